"""Restore plans: every wanted byte comes to its place, whole blocks only, none twice, and not much in vain.

Plans are carried out here by hand, in memory, against tensors whose every element holds its own number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptd.checkpoint.plan import (
    GAP_BYTES_MAX,
    LONG_STRETCH_BLOCKS,
    TARGET_ALIGNMENT_BYTES,
    ReadPlan,
    Want,
    make_plan,
    stage,
)
from ckptd.checkpoint.regions import piece_region, region
from ckptd.checkpoint.shard_map import WINDOW_BYTES
from ckptd.errors import CoverageError, UsageError
from ckptd.format.dtypes import ITEM_BYTES, element_count
from ckptd.format.records import Box, IndexPiece, Span
from ckptd.limits import KIB, MIB
from tests.checkpoint.builder import chunk, cut, flat_numbers, grid, numbered

BLOCK = 128 * KIB
HEADER = 48
"""Bytes before the data of the shards that are made here."""

Shape = tuple[int, ...]
Part = Box | Span | None


@dataclass
class Store:
    """Shards in memory: what lies in them, and where their blocks end."""

    block_bytes: int = 16
    shards: dict[int, bytearray] = field(default_factory=dict[int, bytearray])
    borders: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    pieces: dict[str, list[IndexPiece]] = field(default_factory=dict[str, list[IndexPiece]])
    tensors: dict[str, tuple[str, Shape, bytes]] = field(default_factory=dict[str, tuple[str, Shape, bytes]])

    def save(self, name: str, shape: Shape, dtype: str, parts: list[tuple[int, Part]]) -> None:
        """Append these parts of a numbered tensor to the shards of their ranks."""
        whole = numbered(shape, dtype)
        self.tensors[name] = dtype, shape, whole
        for rank, part in parts:
            shard = self.shards.setdefault(rank, bytearray(b"\xee" * HEADER))
            at, data = len(shard), cut(whole, shape, dtype, part)
            shard += data
            self.borders.setdefault(rank, set()).update(range(at, len(shard), self.block_bytes), [len(shard)])
            box, span = (None, part) if isinstance(part, Span) else (part, None)
            self.pieces.setdefault(name, []).append(IndexPiece(at=at, box=box, bytes=len(data), rank=rank, span=span))

    def want(self, name: str, part: Part) -> Want:
        dtype, shape, _ = self.tensors[name]
        pieces = tuple(self.pieces.get(name, ()))
        return Want(name=name, dtype=dtype, shape=shape, region=region(shape, part), pieces=pieces)

    def plan(self, wants: list[Want]) -> ReadPlan:
        return make_plan(wants, dict.fromkeys(self.shards, self.block_bytes))

    def restore(self, wanted: list[tuple[str, Part]]) -> ReadPlan:
        """Plan, carry out, and compare every byte."""
        wants, size = stage([self.want(name, part) for name, part in wanted])
        plan = self.plan(wants)
        assert plan == self.plan(wants)
        assert plan.target_bytes <= size
        self.check_reads(plan)
        out = bytearray(b"\xdd" * size)
        for shard, read in plan.reads():
            window = self.shards[read.rank][read.start : read.stop]
            for slab in shard.slabs(read):
                for copy in slab.copies():
                    assert 0 <= copy.source < copy.source + copy.length <= len(window)
                    out[copy.target : copy.target + copy.length] = window[copy.source : copy.source + copy.length]
        for want, (name, part) in zip(wants, wanted, strict=True):
            dtype, shape, whole = self.tensors[name]
            assert want.target % ITEM_BYTES[dtype] == 0
            assert out[want.target : want.target + want.size_bytes] == cut(whole, shape, dtype, part), (name, part)
        assert plan.bytes_wanted == sum(want.size_bytes for want in wants)
        return plan

    def check_reads(self, plan: ReadPlan) -> None:
        """Whole blocks, each at most once, in order, and the figures are true."""
        assert [shard.rank for shard in plan.shards] == sorted({shard.rank for shard in plan.shards})
        for shard in plan.shards:
            assert all(read.rank == shard.rank for read in shard.reads)
            assert all(0 < read.stop - read.start <= WINDOW_BYTES for read in shard.reads)
            assert all(a.stop <= b.start for a, b in pairwise(shard.reads))
            assert {edge for read in shard.reads for edge in read[1:]} <= self.borders[shard.rank]
            assert shard.bytes_read == sum(read.stop - read.start for read in shard.reads)
            assert shard.requests == len(shard.reads) > 0
            assert shard.bytes_read <= len(self.shards[shard.rank]) - HEADER  # at most one pass
        assert plan.bytes_read == sum(shard.bytes_read for shard in plan.shards)
        assert plan.requests == sum(shard.requests for shard in plan.shards)


def rows(shape: Shape, number: int, count: int) -> Box:
    """One of ``count`` parts by the first dimension."""
    start, length = chunk(shape[0], number, count)
    return Box((start, *(0 for _ in shape[1:])), (length, *shape[1:]))


# Exhaustive


@pytest.mark.parametrize("saving", range(1, 7))
def test_r112_any_split_of_rows_loads_into_any_other(saving: int) -> None:
    store = Store()
    shapes = [(size, 3) for size in range(10)]
    for shape in shapes:
        store.save(f"{shape[0]}", shape, "int32", [(rank, rows(shape, rank, saving)) for rank in range(saving)])
    for restoring in range(1, 7):
        for rank in range(restoring):
            store.restore([(f"{shape[0]}", rows(shape, rank, restoring)) for shape in shapes])


@pytest.mark.parametrize("saved", [(2, 3), (3, 2), (1, 6), (6, 1)])
def test_r113_any_grid_loads_into_any_other(saved: tuple[int, int]) -> None:
    store = Store()
    store.save("m", (5, 7), "int16", list(enumerate(grid((5, 7), saved))))
    for counts in product(range(1, 6), range(1, 8)):
        boxes = grid((5, 7), counts)
        assert sorted(i for box in boxes for i in flat_numbers((5, 7), box)) == list(range(35))
        store.restore([("m", box) for box in boxes])
        for box in boxes:
            store.restore([("m", box)])


def test_flat_ranges_load_into_boxes_and_the_reverse() -> None:
    shape = (4, 3, 5)
    spans = [Span(0, 7), Span(7, 31), Span(31, 31), Span(31, 60)]
    boxes = grid(shape, (2, 1, 3))
    by_span, by_box = Store(), Store()
    by_span.save("m", shape, "int32", list(enumerate(spans)))
    by_box.save("m", shape, "int32", list(enumerate(boxes)))
    for start in range(0, 61, 3):
        for stop in range(start, 61, 4):
            by_box.restore([("m", Span(start, stop))])
            by_span.restore([("m", Span(start, stop))])
    for counts in product(range(1, 5), range(1, 4), range(1, 6)):
        by_span.restore([("m", box) for box in grid(shape, counts)])


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_dtype_scalars_and_nothing_at_all(dtype: str) -> None:
    store = Store(block_bytes=24)  # cuts items of 16 bytes, which a plan does not mind
    store.save("scalar", (), dtype, [(1, None)])
    store.save("none", (0, 4), dtype, [(0, None)])
    store.save("never stored", (3, 0), dtype, [])
    store.save("m", (3, 5), dtype, list(enumerate(grid((3, 5), (1, 2)))))
    plan = store.restore([("scalar", None), ("none", None), ("never stored", None), ("m", rows((3, 5), 1, 2))])
    assert plan.bytes_wanted == 6 * ITEM_BYTES[dtype]
    assert store.restore([("none", None)]).shards == ()
    assert store.plan([]) == ReadPlan((), 0)


# Anything


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Shape, list[Part], list[Part]]:
    """A shape, pieces that cover it once, and parts that are wanted of it."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    size = element_count(shape)

    def inside() -> Part:
        kind = draw(st.sampled_from(["all", "box", "span"]))
        if kind == "all":
            return None
        if kind == "span":
            start = draw(st.integers(0, size))
            return Span(start, draw(st.integers(start, size)))
        offsets = tuple(draw(st.integers(0, length)) for length in shape)
        return Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))

    pieces: list[Part]
    if draw(st.booleans()):
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=4))})
        pieces = [Span(a, b) for a, b in pairwise(edges)] or [None]
    else:
        edges_by_dim = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
        cells = product(*(list(pairwise(edges)) for edges in edges_by_dim))
        pieces = [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]
    return shape, draw(st.permutations(pieces)), draw(st.lists(st.builds(inside), min_size=1, max_size=3))


@given(
    st.lists(st.tuples(tensors(), st.sampled_from(["int8", "bfloat16", "float32", "complex128"])), max_size=4),
    st.integers(1, 4),
    st.sampled_from([1, 5, 16, 64, 4096]),
    st.data(),
)
def test_whatever_was_stored_comes_to_its_place(
    case: list[tuple[tuple[Shape, list[Part], list[Part]], str]], world: int, block_bytes: int, data: st.DataObject
) -> None:
    store = Store(block_bytes)
    wanted: list[tuple[str, Part]] = []
    for number, ((shape, pieces, parts), dtype) in enumerate(case):
        ranks = data.draw(st.lists(st.integers(0, world - 1), min_size=len(pieces), max_size=len(pieces)))
        store.save(f"{number}", shape, dtype, list(zip(ranks, pieces, strict=True)))
        wanted += [(f"{number}", part) for part in parts]
    store.restore(data.draw(st.permutations(wanted)))


@given(tensors(), st.integers(1, 40), st.integers(1, 30), st.integers(0, 40), st.integers(1, 4))
def test_limits_hold_whatever_they_are(
    case: tuple[Shape, list[Part], list[Part]], window: int, block_bytes: int, gap: int, long: int
) -> None:
    shape, pieces, parts = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptd.checkpoint.plan.WINDOW_BYTES", max(window, block_bytes))
        patch.setitem(globals(), "WINDOW_BYTES", max(window, block_bytes))
        patch.setattr("ckptd.checkpoint.plan.GAP_BYTES_MAX", gap)
        patch.setattr("ckptd.checkpoint.plan.LONG_STRETCH_BLOCKS", long)
        store = Store(block_bytes)
        store.save("m", shape, "int16", [(i % 2, piece) for i, piece in enumerate(pieces)])
        store.restore([("m", part) for part in parts])


# What it costs


def stored(*sizes: int, rank: int = 0, at: int = 4096) -> list[IndexPiece]:
    """Pieces of a shard that is never read, one behind the other."""
    made: list[IndexPiece] = []
    for size in sizes:
        made.append(IndexPiece(at=at, bytes=size, rank=rank))
        at += size
    return made


def whole(piece: IndexPiece, name: str = "t") -> Want:
    shape = (piece.bytes,)
    return Want(name=name, dtype="uint8", shape=shape, region=region(shape), pieces=(piece,))


def some(piece: IndexPiece, start: int, stop: int) -> Want:
    shape = (piece.bytes,)
    return Want(name="t", dtype="uint8", shape=shape, region=region(shape, Span(start, stop)), pieces=(piece,))


def planned(*wants: Want) -> ReadPlan:
    placed, _ = stage(wants)
    return make_plan(placed, dict.fromkeys(range(8), BLOCK))


def spans_read(plan: ReadPlan) -> list[tuple[int, int]]:
    return [read[1:] for _, read in plan.reads()]


def test_all_of_a_shard_is_one_stretch_that_lies_in_memory_as_it_is_stored() -> None:
    dtypes = ["float64", "float32", "int32", "bfloat16", "bool"]
    shapes = [(3, 1 + i % 977) for i in range(20_000)]
    names = sorted(range(len(shapes)), key=lambda i: i % len(dtypes))  # large items first, as in a shard
    sizes = [element_count(shapes[i]) * ITEM_BYTES[dtypes[i % len(dtypes)]] for i in names]
    wants = [
        Want(name=f"{i}", dtype=dtypes[i % len(dtypes)], shape=shapes[i], region=region(shapes[i]), pieces=(piece,))
        for i, piece in zip(names, stored(*sizes), strict=True)
    ]
    placed, size = stage(wants[::-1])  # in whatever order they are wanted
    assert size == sum(sizes)
    assert all(want.target % ITEM_BYTES[want.dtype] == 0 for want in placed)
    plan = make_plan(placed, {0: BLOCK})
    assert plan.bytes_read == plan.bytes_wanted == plan.target_bytes == size
    assert plan.requests <= -(-size // (WINDOW_BYTES - BLOCK)) + 1
    assert spans_read(plan)[0][0] == 4096
    for shard, read in plan.reads():
        (slab,) = shard.slabs(read)  # one copy: it is read straight into place
        assert (slab.source, slab.target, slab.lengths) == (0, read.start - 4096, (read.stop - read.start,))


@given(
    st.lists(st.integers(8 * MIB, 40 * MIB), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(0, 2**32),
    st.integers(1, 4),
)
def test_little_is_read_in_vain_where_much_lies_together(sizes: list[int], world: int, salt: int, step: int) -> None:
    wants: list[Want] = []
    for number, size in enumerate(sizes):
        pieces = stored(size, *sizes, rank=number % world, at=4096 + salt % 997 + 100 * MIB * number)
        spare = size - 8 * MIB
        start = salt * (number + 1) * 7919 % (spare + 1)
        wants.append(some(pieces[0], start, start + 8 * MIB + (spare - start) // step))
    plan = planned(*wants)
    assert plan.bytes_read <= 1.05 * plan.bytes_wanted
    assert plan.requests <= plan.bytes_read / WINDOW_BYTES + len(sizes)
    assert all(a.stop <= b.start for shard in plan.shards for a, b in pairwise(shard.reads))


def test_rows_of_large_tensors_for_other_numbers_of_ranks_are_read_almost_alone() -> None:
    shape = (1031, 32_771)  # of 2 bytes: rows lie across all blocks
    row = shape[1] * 2
    for saving, restoring in product((2, 3, 4), repeat=2):
        held = [chunk(shape[0], rank, saving) for rank in range(saving)]
        pieces = tuple(
            IndexPiece(at=4096, box=Box((start, 0), (count, shape[1])), bytes=count * row, rank=rank)
            for rank, (start, count) in enumerate(held)
        )
        total = 0
        for rank in range(restoring):
            box = rows(shape, rank, restoring)
            want = Want(name="m", dtype="bfloat16", shape=shape, region=region(shape, box), pieces=pieces)
            plan = planned(want)
            assert plan.bytes_wanted == want.size_bytes
            assert plan.bytes_read <= plan.bytes_wanted + 2 * BLOCK * len(plan.shards)
            assert plan.bytes_read <= 1.05 * plan.bytes_wanted
            total += plan.bytes_read
        assert total <= 1.05 * element_count(shape) * 2


def test_short_stretches_are_joined_over_small_gaps_only() -> None:
    (piece,) = stored(64 * MIB)
    block, gap = BLOCK, GAP_BYTES_MAX
    near = planned(some(piece, 0, block), some(piece, block + gap, 2 * block + gap))
    assert spans_read(near) == [(4096, 4096 + 2 * block + gap)]
    far = planned(some(piece, 0, block), some(piece, 2 * block + gap, 3 * block + gap))
    assert len(spans_read(far)) == 2
    assert far.bytes_read == far.bytes_wanted == 2 * block


@pytest.mark.parametrize("first", [1, LONG_STRETCH_BLOCKS - 1, LONG_STRETCH_BLOCKS])
@pytest.mark.parametrize("second", [1, LONG_STRETCH_BLOCKS - 1, LONG_STRETCH_BLOCKS])
def test_nothing_is_read_to_reach_a_long_stretch(first: int, second: int) -> None:
    (piece,) = stored(64 * MIB)
    plan = planned(some(piece, 0, first * BLOCK), some(piece, (first + 1) * BLOCK, (first + 1 + second) * BLOCK))
    both_short = max(first, second) < LONG_STRETCH_BLOCKS
    assert plan.requests == (1 if both_short else 2)
    assert plan.bytes_read - plan.bytes_wanted == (BLOCK if both_short else 0)


def test_a_window_is_not_exceeded_to_read_a_gap() -> None:
    (piece,) = stored(64 * MIB)
    step = 2 * BLOCK
    plan = planned(*(some(piece, at, at + BLOCK) for at in range(0, 40 * MIB, step)))
    assert all(stop - start <= WINDOW_BYTES for start, stop in spans_read(plan))
    assert plan.requests == 5
    assert plan.bytes_read == 40 * MIB - 5 * BLOCK


def test_small_pieces_join_with_their_neighbors_and_over_unwanted_ones() -> None:
    pieces = stored(100, 200, 300, 2 * MIB, 400, 500)
    plan = planned(whole(pieces[0]), some(pieces[2], 10, 20), whole(pieces[4]), whole(pieces[5]))
    assert spans_read(plan) == [(4096, 4696), (4696 + 2 * MIB, 4696 + 2 * MIB + 900)]


def test_a_window_ends_between_blocks_of_whatever_piece_it_ends_in() -> None:
    pieces = stored(3 * MIB + 5, 20 * MIB, 7, 7, 6 * MIB, 6 * MIB)
    plan = planned(*map(whole, pieces))
    borders = {piece.at + at for piece in pieces for at in range(0, piece.bytes, BLOCK)} | {pieces[-1].at + 6 * MIB}
    read = spans_read(plan)
    assert all(stop == start for (_, stop), (start, _) in pairwise(read))
    assert {edge for one in read for edge in one} <= borders
    assert all(stop - start > WINDOW_BYTES - BLOCK for start, stop in read[:-1])


def test_what_is_wanted_twice_is_read_once_and_comes_to_both_places() -> None:
    (piece,) = stored(40 * MIB)
    plan = planned(whole(piece), some(piece, 100, 200), some(piece, 30 * MIB, 31 * MIB))
    assert plan.bytes_read == 40 * MIB
    assert plan.bytes_wanted == 41 * MIB + 100
    came = sum(slab.size_bytes for shard, read in plan.reads() for slab in shard.slabs(read))
    assert came == plan.bytes_wanted


def test_planning_columns_needs_no_time_for_the_rows() -> None:
    shape = (10**9, 2)  # more rows than anybody could count
    piece = IndexPiece(at=4096, bytes=8 * 10**9, rank=0)
    want = Want(name="m", dtype="float32", shape=shape, region=region(shape, Box((0, 1), (10**9, 1))), pieces=(piece,))
    plan = make_plan([want], {0: BLOCK})
    assert plan.requests == -(-8 * 10**9 // WINDOW_BYTES)
    assert plan.bytes_read == 2 * plan.bytes_wanted
    taken = [(read, shard.slabs(read)) for shard, read in plan.reads()]
    assert sum(slab.size_bytes for _, parts in taken for slab in parts) == plan.bytes_wanted
    assert all(len(parts) == 1 for _, parts in taken)


@pytest.mark.parametrize("gap", [1, 2, 56])
def test_rows_with_whole_blocks_between_them_are_read_alone(gap: int) -> None:
    length = LONG_STRETCH_BLOCKS * BLOCK
    shape = (40, length + gap * BLOCK)
    piece = IndexPiece(at=4096, bytes=element_count(shape), rank=0)
    box = Box((0, gap * BLOCK), (40, length))
    want = Want(name="m", dtype="uint8", shape=shape, region=region(shape, box), pieces=(piece,))
    plan = make_plan([want], {0: BLOCK})
    assert (plan.requests, plan.bytes_read) == (40, plan.bytes_wanted)


# Staging memory, and what is refused


def test_memory_is_aligned_for_every_dtype_and_nothing_overlaps() -> None:
    wants = [
        replace(some(piece, 0, 3), dtype=dtype, shape=(5,), region=region((5,), Span(1, 4)))
        for dtype, piece in zip(ITEM_BYTES, stored(*[5 * 16] * len(ITEM_BYTES)), strict=True)
    ]
    placed, size = stage(wants)
    assert [replace(want, target=0) for want in placed] == wants
    assert all(want.target % ITEM_BYTES[want.dtype] == 0 for want in placed)
    by_target = sorted(placed, key=lambda want: want.target)
    assert all(a.target + a.size_bytes <= b.target for a, b in pairwise(by_target))
    assert by_target[-1].target + by_target[-1].size_bytes == size
    assert size <= sum(want.size_bytes + TARGET_ALIGNMENT_BYTES for want in wants)
    assert stage([]) == ([], 0)


def test_a_piece_that_lies_askew_is_aligned_in_memory_all_the_same() -> None:
    piece = IndexPiece(at=4097, bytes=16, rank=0)
    want = Want(name="t", dtype="float64", shape=(2,), region=region((2,)), pieces=(piece,))
    ((placed,), _) = stage([want])
    assert placed.target % 8 == 0


def test_pieces_that_do_not_hold_all_are_refused_by_name() -> None:
    store = Store()
    store.save("m", (4, 4), "int32", [(0, Box((0, 0), (2, 4))), (1, Box((3, 0), (1, 4)))])
    store.restore([("m", Box((3, 1), (1, 2)))])
    with pytest.raises(CoverageError, match="m: the pieces hold 48 of the 64 bytes that are wanted"):
        store.plan([store.want("m", None)])


@pytest.mark.parametrize("block_bytes", [0, -1, WINDOW_BYTES + 1])
def test_blocks_that_cannot_be_are_refused(block_bytes: int) -> None:
    with pytest.raises(UsageError, match="in the shard of rank 0"):
        make_plan([whole(stored(10)[0])], {0: block_bytes})


def test_pieces_that_hold_nothing_of_it_cost_nothing() -> None:
    store = Store()
    store.save("m", (6, 2), "int32", [(rank, rows((6, 2), rank, 3)) for rank in range(3)])
    plan = store.restore([("m", rows((6, 2), 1, 3))])
    assert [shard.rank for shard in plan.shards] == [1]
    assert piece_region(store.pieces["m"][1], (6, 2)) == region((6, 2), rows((6, 2), 1, 3))
