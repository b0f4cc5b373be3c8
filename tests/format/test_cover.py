"""Exact cover, held against brute force: pieces are accepted if and only if they hold every element once."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import CoverageError
from ckptd.format.cover import (
    boxes_of,
    check_cover,
    check_layout,
    check_piece,
    held_bytes,
    piece_elements,
    pieces_in_file_order,
    resident_start,
    residents_in_slot_order,
    span_boxes,
)
from ckptd.format.records import Box, IndexPiece, Layout, Piece, Span, TensorEntry, encode
from tests.format.saved import Held, Rank, whole

Shape = tuple[int, ...]


def flat_indices(box: Box, shape: Shape) -> list[int]:
    """The elements of a box as numbers in row-major order."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    ranges = [range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True)]
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*ranges)]


def piece(where: Box | Span | None, shape: Shape, rank: int = 0) -> IndexPiece:
    """A piece of uint8."""
    box, span = (where, None) if isinstance(where, Box) else (None, where)
    found = IndexPiece(at=0, box=box, bytes=0, rank=rank, span=span)
    return IndexPiece(at=0, box=box, bytes=piece_elements(found, shape), rank=rank, span=span)


def accepted(shape: Shape, pieces: Sequence[IndexPiece]) -> bool:
    try:
        check_cover("t", shape, pieces)
    except CoverageError:
        return False
    return True


def covers(shape: Shape, pieces: Sequence[IndexPiece]) -> bool:
    """The same, element by element."""
    held = Counter(i for found in pieces for box in boxes_of(found, shape) for i in flat_indices(box, shape))
    return held == Counter(range(math.prod(shape)))


SMALL_SHAPES = [shape for dims in range(4) for shape in itertools.product(range(4), repeat=dims)]


def test_ranges_as_boxes_are_exact_for_all_small_shapes() -> None:
    checked = 0
    for shape in SMALL_SHAPES:
        count = math.prod(shape)
        for start in range(count + 1):
            for stop in range(start, count + 1):
                boxes = span_boxes(Span(start, stop), shape)
                assert len(boxes) <= max(2 * len(shape) - 1, 1)
                assert [i for box in boxes for i in flat_indices(box, shape)] == list(range(start, stop))
                checked += 1
    assert checked > 1500


def test_r02_ranges_beyond_32_bits() -> None:
    shape = (2**33 + 8, 3)
    boxes = span_boxes(Span(2**32 + 1, 3 * (2**33 + 8) - 1), shape)
    assert sum(math.prod(box.lengths) for box in boxes) == 3 * (2**33 + 8) - 1 - 2**32 - 1
    check_cover("t", shape, [piece(Span(0, 2**32 + 1), shape), piece(Span(2**32 + 1, 3 * (2**33 + 8)), shape)])
    with pytest.raises(CoverageError, match=f"{3 * (2**33 + 8) - 1} of {3 * (2**33 + 8)} elements"):
        check_cover("t", shape, [piece(Span(1, 3 * (2**33 + 8)), shape)])


small_shapes = st.sampled_from([shape for shape in SMALL_SHAPES if math.prod(shape) <= 12])


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    corners = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in corners), tuple(high - low for low, high in corners))


@st.composite
def spans_in(draw: st.DrawFn, shape: Shape) -> Span:
    count = math.prod(shape)
    return Span(*sorted((draw(st.integers(0, count)), draw(st.integers(0, count)))))


@st.composite
def any_pieces(draw: st.DrawFn) -> tuple[Shape, list[IndexPiece]]:
    shape = draw(small_shapes)
    places = draw(st.lists(st.none() | boxes_in(shape) | spans_in(shape), max_size=5))
    return shape, [piece(where, shape, rank) for rank, where in enumerate(places)]


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[Shape, list[IndexPiece]]:
    """A tensor cut into boxes, again and again: an exact cover, sometimes with a piece lost, doubled or grown."""
    shape = draw(small_shapes)
    parts = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        box = parts.pop(draw(st.integers(0, len(parts) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.lengths[d]))
        for offset, length in ((0, cut), (cut, box.lengths[d] - cut)):
            offsets, lengths = list(box.offsets), list(box.lengths)
            offsets[d] += offset
            lengths[d] = length
            parts.append(Box(tuple(offsets), tuple(lengths)))
    fate = draw(st.sampled_from(["kept", "kept", "lost", "doubled", "grown"]))
    number = draw(st.integers(0, len(parts) - 1))
    if fate == "lost":
        parts.pop(number)
    elif fate == "doubled":
        parts.append(parts[number])
    elif fate == "grown" and shape:
        box, d = parts[number], draw(st.integers(0, len(shape) - 1))
        lengths = list(box.lengths)
        lengths[d] = min(lengths[d] + 1, shape[d] - box.offsets[d])
        parts[number] = Box(box.offsets, tuple(lengths))
    return shape, [piece(box, shape, rank) for rank, box in enumerate(draw(st.permutations(parts)))]


@settings(max_examples=400)
@given(any_pieces() | cut_up())
def test_pieces_are_accepted_exactly_if_they_cover_once(case: tuple[Shape, list[IndexPiece]]) -> None:
    shape, pieces = case
    assert accepted(shape, pieces) == covers(shape, pieces)


def rows_of(rows: int, ranks: int) -> list[range]:
    """Rows over ranks as ``torch.chunk`` deals them: the last ranks may have fewer, or none."""
    each = -(-rows // ranks)
    return [range(min(rank * each, rows), min((rank + 1) * each, rows)) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", range(1, 7))
def test_uneven_rows_over_any_number_of_ranks(ranks: int) -> None:
    for rows in range(10):
        shape = (rows, 3)
        pieces = [
            piece(Box((own.start, 0), (len(own), 3)), shape, rank) for rank, own in enumerate(rows_of(rows, ranks))
        ]
        assert accepted(shape, pieces)
        for number, found in enumerate(pieces):
            if found.bytes:
                assert not accepted(shape, pieces[:number] + pieces[number + 1 :])
                assert not accepted(shape, [*pieces, found])
                assert not accepted((rows + 1, 3), pieces)


def grid() -> list[IndexPiece]:
    """5 by 7 over 2 by 3 ranks: 3 and 2 rows, 3, 3 and 1 columns."""
    return [
        piece(Box((row.start, column.start), (len(row), len(column))), (5, 7), 3 * i + j)
        for i, row in enumerate(rows_of(5, 2))
        for j, column in enumerate(rows_of(7, 3))
    ]


def test_r113_an_unevenly_split_matrix_is_covered_exactly_once_or_refused() -> None:
    check_cover("w", (5, 7), grid())
    for rank in range(6):
        with pytest.raises(
            CoverageError, match=rf"w: {35 - grid()[rank].bytes} of 35 elements are covered, by ranks \["
        ):
            check_cover("w", (5, 7), [found for found in grid() if found.rank != rank])


def test_r113_a_piece_in_the_wrong_place_names_both_ranks() -> None:
    pieces = grid()
    pieces[4] = piece(Box((3, 2), (2, 3)), (5, 7), 4)  # one column too far left
    with pytest.raises(CoverageError, match=r"w: ranks 3 and 4 both hold elements of"):
        check_cover("w", (5, 7), pieces)


def test_a_scalar_is_saved_by_one_rank() -> None:
    check_cover("s", (), [piece(None, (), 1)])
    with pytest.raises(CoverageError, match="s: saved whole by ranks 1 and 2"):
        check_cover("s", (), [piece(None, (), 1), piece(None, (), 2)])
    with pytest.raises(CoverageError, match="s: 0 of 1 elements are covered, by ranks none"):
        check_cover("s", (), [])


def test_an_empty_tensor_needs_no_piece_and_bears_any_number() -> None:
    for shape in ((0,), (3, 0), (0, 0)):
        for pieces in ([], [piece(None, shape, 0), piece(None, shape, 1)], [piece(Span(0, 0), shape)]):
            check_cover("e", shape, pieces)


@pytest.mark.parametrize(
    ("where", "bytes_", "message"),
    [
        ((Box((0, 0), (2, 3)), Span(0, 6)), 24, "a box or a range, not both"),
        ((Box((0,), (2,)), None), 8, "does not lie in shape"),
        ((Box((0, 0, 0), (1, 1, 1)), None), 4, "does not lie in shape"),
        ((Box((0, 0), (2,)), None), 8, "does not lie in shape"),
        ((Box((1, 0), (2, 3)), None), 24, "does not lie in shape"),
        ((Box((0, 4), (1, 0)), None), 0, "does not lie in shape"),
        ((None, Span(0, 7)), 28, "does not lie in shape"),
        ((None, Span(3, 2)), 0, "does not lie in shape"),
        ((None, None), 23, "23 bytes where its shape and dtype make 24"),
        ((None, Span(0, 2)), 24, "24 bytes where its shape and dtype make 8"),
        ((Box((0, 0), (1, 3)), None), 24, "24 bytes where its shape and dtype make 12"),
    ],
)
def test_a_piece_lies_inside_its_tensor_and_has_its_bytes(
    where: tuple[Box | None, Span | None], bytes_: int, message: str
) -> None:
    found = Piece(at=0, box=where[0], bytes=bytes_, span=where[1])
    with pytest.raises(CoverageError, match=f"^w: .*{message}"):
        check_piece(found, (2, 3), "float32", "w")


def layout(*held: Held, **changed: object) -> Layout:
    found, _ = Rank(held).stored()
    fields = {name: getattr(found, name) for name in found.__struct_fields__}
    return Layout(**(fields | changed))


def test_pieces_are_given_in_file_order() -> None:
    found = layout(whole("a", "uint8", (3,)), whole("empty", "int64", (0,)), whole("b", "int64", (2,)))
    pieces = check_layout(found)
    assert pieces == pieces_in_file_order(found)
    start = found.header_bytes
    assert [(p.at, p.bytes) for p in pieces] == [(start, 0), (start, 16), (start + 16, 3)]
    # An empty piece lies where the next one starts, also where it is named after it.
    later = layout(whole("a", "uint8", (3,)), whole("empty", "int64", (0,)))
    assert [(p.at, p.bytes) for p in check_layout(later)] == [(start, 0), (start, 3)]


def test_a_layout_that_does_not_hold_is_refused() -> None:
    a, b = whole("a", "float32", (2,)), whole("b", "float32", (3,))
    good = layout(a, b, aliases={"tied": "a"})
    check_layout(good)
    first = good.tensors[0]
    start = good.header_bytes

    def moved(at: int, bytes_: int = 12) -> TensorEntry:
        return TensorEntry(
            dtype="float32", name="b", per_rank=False, pieces=(Piece(at=at, bytes=bytes_),), shape=(bytes_ // 4,)
        )

    for changed, message in (
        ({"tensors": (first, first)}, "a: named twice"),
        ({"tensors": (first, moved(start + 12))}, f"hole or overlap in the shard at byte {start + 8}"),
        ({"tensors": (first, moved(start + 4))}, "hole or overlap"),
        ({"tensors": (first, moved(start))}, "hole or overlap"),
        ({"tensors": (moved(start + 8),)}, "hole or overlap"),
        ({"tensors": (first,)}, "described up to byte"),
        ({"shard_bytes": good.shard_bytes + 1}, "described up to byte"),
        ({"shard_bytes": good.shard_bytes - 1}, "described up to byte"),
        ({"header_bytes": start - 1}, "hole or overlap"),
        ({"aliases": {"tied": "c"}}, "tied: an alias of c"),
        ({"aliases": {"a": "b"}}, "a: an alias of b"),
        ({"aliases": {"tied": "again", "again": "a"}}, "tied: an alias of again"),
    ):
        with pytest.raises(CoverageError, match=message):
            check_layout(layout(a, b, **changed))
    unknown = TensorEntry(dtype="float7", name="a", per_rank=False, pieces=(), shape=())
    with pytest.raises(CoverageError, match="a: unknown dtype 'float7'"):
        check_layout(layout(tensors=(unknown,)))


def with_residents(*residents: Piece, resident_bytes: int, per_rank: bool = False) -> Layout:
    """A rank that owns ``a``, of 8 bytes behind a header of 4096, and holds some of ``b`` in its slot only."""
    b = TensorEntry(dtype="float32", name="b", per_rank=per_rank, pieces=(), resident=residents, shape=(6,))
    a = layout(whole("a", "float32", (2,))).tensors[0]
    return layout(whole("a", "float32", (2,)), tensors=(a, b), resident_bytes=resident_bytes)


def test_resident_pieces_lie_dense_from_the_page_behind_the_shard() -> None:
    low, high = Piece(at=8192, bytes=8, span=Span(0, 2)), Piece(at=8200, bytes=16, span=Span(2, 6))
    for order in ((low, high), (high, low)):
        found = with_residents(*order, resident_bytes=8216)
        assert [piece.bytes for piece in check_layout(found)] == [8]  # the shard's alone
        assert residents_in_slot_order(found) == [low, high]
        assert (resident_start(found), held_bytes(found)) == (8192, 8216)
    bare = layout(whole("a", "float32", (2,)))
    assert held_bytes(bare) == bare.shard_bytes == 4104
    assert encode(bare) == encode(layout(whole("a", "float32", (2,)), resident_bytes=0))
    assert b"resident" not in encode(bare)


@pytest.mark.parametrize(
    ("residents", "end", "message"),
    [
        ([Piece(at=4104, bytes=24)], 4128, "slot behind the shard at byte 8192: the next piece starts at 4104"),
        ([Piece(at=8192, bytes=24)], 8215, "up to byte 8215 are described up to byte 8216"),
        ([Piece(at=8192, bytes=24)], 0, "up to byte 0 are described up to byte 8216"),
        ([], 8192, "up to byte 8192 are described up to byte 0"),
        ([Piece(at=8192, bytes=20)], 8212, "b: a piece of 20 bytes where its shape"),
        ([Piece(at=8192, bytes=8, span=Span(5, 7))], 8200, "b: range 5:7 does not lie in shape"),
        ([Piece(at=8192, bytes=8, span=Span(0, 2)), Piece(at=8204, bytes=4, span=Span(2, 3))], 8208, "at byte 8200"),
        ([Piece(at=8192, bytes=8, span=Span(0, 2)), Piece(at=8196, bytes=4, span=Span(2, 3))], 8200, "at byte 8200"),
    ],
)
def test_resident_pieces_that_do_not_hold_are_refused(residents: list[Piece], end: int, message: str) -> None:
    with pytest.raises(CoverageError, match=message):
        check_layout(with_residents(*residents, resident_bytes=end))


def test_a_value_of_a_ranks_own_has_no_resident_piece() -> None:
    with pytest.raises(CoverageError, match="b: a value of its own has no copy"):
        check_layout(with_residents(Piece(at=8192, bytes=24), resident_bytes=8216, per_rank=True))
