"""Which pieces hold what is wanted: those, and no other receipts; and an index that lies is not believed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.checkpoint import catalog
from ckptd.checkpoint import reader as reader_module
from ckptd.checkpoint.listing import show_checkpoint
from ckptd.checkpoint.locating import sought
from ckptd.checkpoint.reader import CheckpointReader
from ckptd.checkpoint.regions import Region, region
from ckptd.checkpoint.run import Run
from ckptd.checkpoint.tensors import of_index, read_region
from ckptd.checkpoint.verify import verify
from ckptd.errors import CoverageError, IntegrityError, UsageError
from ckptd.format import proof
from ckptd.format.keys import Version, manifest_key
from ckptd.format.proof import prove
from ckptd.format.records import (
    Box,
    Grid,
    IndexEntry,
    IndexPiece,
    Manifest,
    RankRun,
    Span,
    encode,
)
from tests.checkpoint.builder import Held, State, commit, make_checkpoint, open_generation, pattern, tensor, write_rank
from tests.checkpoint.test_reader import Counting

ROWS, COLUMNS = 10, 6
WHOLE = pattern(ROWS * COLUMNS * 4)


def cut(box: Box) -> bytes:
    """A box of the matrix."""
    (top, left), (height, width) = box.offsets, box.lengths
    rows = range(top, top + height)
    return b"".join(WHOLE[(r * COLUMNS + left) * 4 : (r * COLUMNS + left + width) * 4] for r in rows)


def mesh(rank: int) -> State:
    """One of twelve ranks, which cut a matrix four by three: rows of 3, 3, 3 and 1, and columns of 2. Of another, each
    of the last four holds a row or two."""
    row, column = divmod(rank, 3)
    box = Box((3 * row, 2 * column), (min(3, ROWS - 3 * row), 2))
    held = [
        Held("w", (ROWS, COLUMNS), cut(box), box=box),
        tensor("own", (2,), salt=rank, per_rank=True),
        tensor("same", (3,), per_rank=True),
    ]
    if rank >= 8:
        start, stop = [(0, 7), (7, 8), (8, 20), (20, 25)][rank - 8]
        held.append(Held("flat", (5, 5), pattern(100)[4 * start : 4 * stop], span=Span(start, stop)))
    return State(held, {"rank": rank, "both": 1}, {"tied": "w", f"of{rank}": "w"})


async def world(run: Run, states: Sequence[State]) -> Version:
    version = Version(10, await open_generation(run, world=len(states)))
    await make_checkpoint(run, version, states)
    return version


async def test_only_the_receipts_of_the_ranks_that_hold_it_are_opened(run: Run) -> None:
    version = await world(run, [mesh(rank) for rank in range(12)])
    counting = Counting(run)
    for wanted, ranks in (
        (Box((0, 0), (1, 1)), [0]),
        (Box((2, 1), (2, 2)), [0, 1, 3, 4]),
        (Box((9, 0), (1, 6)), [9, 10, 11]),
        (Span(0, 6), [0, 1, 2]),
        (Span(5, 7), [0, 2]),
        (Box((4, 3), (0, 2)), []),
        (None, list(range(12))),
    ):
        async with await CheckpointReader.open(Run(counting, run.id), version) as reader:
            counting.gets.clear()
            found = await reader.locate("w", region((ROWS, COLUMNS), wanted))
            assert [piece.rank for piece in found] == ranks
            assert len(counting.gets) == len(ranks)
            for piece in found:
                assert piece.box is not None
                out = bytearray(piece.bytes)
                await reader.read(piece.rank, piece.at, piece.at + piece.bytes, memoryview(out))
                assert out == cut(piece.box)
            again = await reader.locate("w", region((ROWS, COLUMNS), wanted))
            assert again == found
            assert len(counting.gets) == len(ranks)


async def test_every_box_and_range_is_read_from_any_cut(run: Run) -> None:
    version = await world(run, [mesh(rank) for rank in range(12)])
    flat = pattern(100)
    async with await CheckpointReader.open(run, version) as reader:
        w, odd = await reader.find("w"), await reader.find("flat")
        assert w is not None
        assert odd is not None
        assert w.grid == Grid(chunks=(3, 2), ranks=RankRun(0, 12, 1))
        assert odd.grid is None
        assert [piece.rank for piece in odd.pieces] == [8, 9, 10, 11]
        for top, left in itertools.product(range(0, ROWS, 3), range(0, COLUMNS, 2)):
            box = Box((top, left), (ROWS - top, COLUMNS - left))
            out = bytearray(4 * (ROWS - top) * (COLUMNS - left))
            await read_region(reader, of_index(w), region(w.shape, box), memoryview(out))
            assert out == cut(box)
        for start, stop in itertools.combinations(range(0, 26, 3), 2):
            out = bytearray(4 * (stop - start))
            await read_region(reader, of_index(odd), region(odd.shape, Span(start, stop)), memoryview(out))
            assert out == flat[4 * start : 4 * stop]


async def test_what_is_not_there_is_the_callers_mistake(run: Run) -> None:
    version = await world(run, [mesh(rank) for rank in range(12)])
    async with await CheckpointReader.open(run, version) as reader:
        for name in ("x", "own", "tied"):
            with pytest.raises(UsageError, match=f"has no '{name}' that is one value for all ranks"):
                await reader.locate(name, region((2,)))
        for box in (Box((0,), (2,)), Box((8, 0), (3, 1)), Box((-1, 0), (1, 1))):
            with pytest.raises(UsageError, match="does not lie in shape"):
                await reader.locate("w", Region((box,)))


async def test_a_value_that_is_equal_on_all_ranks_is_found_and_other_own_values_are_not(run: Run) -> None:
    version = await world(run, [mesh(rank) for rank in range(12)])
    async with await CheckpointReader.open(run, version) as reader:
        assert await reader.find("own") is None
        (piece,) = await reader.locate("same", region((3,)))
        assert piece.rank == 0
        promised = await reader.promised(5, "same")
        assert promised is not None
        assert promised.per_rank


async def test_grids_are_shown_by_their_cells_and_own_values_by_their_rank(run: Run) -> None:
    version = await world(run, [mesh(rank) for rank in range(12)])
    shown = await show_checkpoint(run, version)
    assert [(tensor.name, rank, tensor.cut) for rank, tensor in shown.tensors] == [
        ("flat", None, (4,)),
        *(("own", rank, (1,)) for rank in range(12)),
        ("same", None, (1,)),
        ("w", None, (4, 3)),
    ]
    assert shown.aliases["of7"] == "w"


async def test_what_trees_and_aliases_have_in_common(run: Run) -> None:
    version = await world(run, [mesh(rank) for rank in range(12)])
    async with await CheckpointReader.open(run, version) as reader:
        tree = msgspec.json.decode((await reader.common()).tree)
        assert tree == {"$": "dict", "v": [["rank", {"$": "per_rank"}], ["both", 1]]}
        assert await reader.aliases() == {"tied": "w"} | {f"of{rank}": "w" for rank in range(12)}
        assert await reader.common() is await reader.common()
    version = Version(20, 1)
    await make_checkpoint(run, version, State([tensor("w", (2,))], {"a": (1,)}, {"tied": "w"}))
    async with await CheckpointReader.open(run, version) as reader:
        assert reader.manifest.common is None
        assert msgspec.json.decode((await reader.common()).tree)["v"][0][0] == "a"
        assert await reader.aliases() == {"tied": "w"}


async def test_a_checkpoint_without_a_common_record_has_one_made_of_its_receipts(run: Run) -> None:
    version = Version(10, await open_generation(run, world=12))
    receipts = [await write_rank(run, version, mesh(rank), rank=rank, world=12) for rank in range(12)]
    early = prove(receipts, early=True)
    assert not early.objects
    await run.backend.put(manifest_key(version), encode(early.manifest))
    async with await CheckpointReader.open(run, version) as reader:
        assert msgspec.json.decode((await reader.common()).tree)["v"] == [["rank", {"$": "per_rank"}], ["both", 1]]
        assert [piece.rank for piece in await reader.locate("w", region((ROWS, COLUMNS)))] == list(range(12))
    assert (await verify(run, version)).good


# Many ranks


async def test_receipts_in_parts_are_loaded_as_they_are_needed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (proof, catalog):
        monkeypatch.setattr(module, "RECEIPTS_INLINE_MAX", 5)
    version = await world(run, [mesh(rank) for rank in range(12)])
    counting = Counting(run)
    async with await CheckpointReader.open(Run(counting, run.id), version) as reader:
        assert reader.manifest.receipts == ()
        assert len(reader.manifest.receipt_parts) == 3
        counting.gets.clear()
        await reader.locate("w", region((ROWS, COLUMNS), Box((9, 0), (1, 6))))
        assert sorted(key.rsplit("/", 1)[1] for key in counting.gets) == [
            "rank-00009-of-00012.json",
            "rank-00010-of-00012.json",
            "rank-00011-of-00012.json",
            "receipts-00001.json",
            "receipts-00002.json",
        ]
        with pytest.raises(UsageError, match="ranks 0 to 11"):
            await reader.receipt(12)
    assert (await verify(run, version)).good
    lost = msgspec.structs.replace(reader.manifest, receipt_parts=reader.manifest.receipt_parts[:2])
    async with CheckpointReader(run, lost) as cut_short:
        with pytest.raises(IntegrityError, match="names 2 parts of its receipts"):
            await cut_short.receipt(11)


async def test_receipts_are_kept_within_a_budget_and_loaded_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    version = await world(run, [mesh(rank) for rank in range(12)])
    counting = Counting(run)
    for budget, loads in ((1 << 20, 12), (0, 24)):  # in order of rank, the oldest is always the next
        monkeypatch.setattr(reader_module, "RECEIPTS_KEPT_BYTES", budget)
        async with await CheckpointReader.open(Run(counting, run.id), version) as reader:
            counting.gets.clear()
            for _ in range(2):
                for rank in range(12):
                    await reader.receipt(rank)
            assert len(counting.gets) == loads


# An index that lies

Lie = Callable[[IndexEntry], IndexEntry]


def changed(**fields: Any) -> Lie:
    return lambda entry: msgspec.structs.replace(entry, **fields)


def regrid(chunks: tuple[int, ...], ranks: RankRun | int) -> Lie:
    return changed(grid=Grid(chunks=chunks, ranks=ranks))


def other_pieces(change: Callable[[tuple[IndexPiece, ...]], Sequence[IndexPiece]]) -> Lie:
    return lambda entry: msgspec.structs.replace(entry, pieces=tuple(change(entry.pieces)))


HUGE = (2**30, 2**30)


@pytest.mark.parametrize(
    ("name", "lie", "complaint"),
    [
        ("w", regrid((3, 3), RankRun(0, 8, 1)), "'w' has a piece that rank [0-9]+ has not"),
        ("w", regrid((3, 2), RankRun(0, 24, 2)), "a grid of 12 cells on 12 ranks, 0:24:2"),
        ("w", regrid((3, 2), RankRun(0, 23, 2)), "'w' has a piece that rank [0-9]+ has not"),
        ("w", regrid((3, 2), RankRun(1, 13, 1)), "'w' has a piece that rank [0-9]+ has not"),
        ("w", regrid((3, 2), RankRun(0, 11, 1)), "a grid of 12 cells on 11 ranks"),
        ("w", regrid((3, 2), RankRun(0, 13, 12)), "a grid of 12 cells on 2 ranks"),
        ("w", regrid((3, 2), RankRun(5, 5, 1)), "a grid of 12 cells on 0 ranks"),
        ("w", regrid((10, 6), RankRun(12, 13, 1)), "w: lies on rank 12 of 12"),
        ("w", regrid((3,), RankRun(0, 12, 1)), "does not fit the shape"),
        ("w", regrid((3, 0), RankRun(0, 12, 1)), "does not fit the shape"),
        ("w", regrid((11, 6), RankRun(0, 1, 1)), "does not fit the shape"),
        ("w", regrid((3, 2), 0), "on a list of ranks that is not there"),
        ("w", changed(shape=HUGE), "a grid of [0-9]+ cells on 12 ranks"),
        ("w", changed(shape=HUGE, grid=Grid(chunks=(1, 1), ranks=0)), "list of ranks that is not there"),
        ("w", changed(dtype="int32"), "'w' is not what rank [0-9]+ saved"),
        ("w", changed(grid=None), "w: 0 of 25 elements are covered, by ranks none"),
        ("flat", changed(shape=(25,)), "'flat' is not what rank [0-9]+ saved"),
        (
            "flat",
            other_pieces(lambda pieces: pieces[1:]),
            r"flat: 18 of 25 elements are covered, by ranks \[9, 10, 11\]",
        ),
        ("flat", other_pieces(lambda pieces: (*pieces, pieces[2])), "flat: ranks 10 and 10 both hold"),
        (
            "flat",
            other_pieces(lambda pieces: [msgspec.structs.replace(piece, rank=3) for piece in pieces]),
            "'flat' is not what rank 3 saved",
        ),
        (
            "flat",
            other_pieces(lambda p: [*p[:3], msgspec.structs.replace(p[3], span=None, box=Box((4, 0), (1, 5)))]),
            "'flat' has a piece that rank 11 has not",
        ),
        (
            "flat",
            other_pieces(lambda pieces: [msgspec.structs.replace(piece, rank=99) for piece in pieces]),
            "flat: lies on rank 99 of 12",
        ),
    ],
)
async def test_an_index_that_lies_is_not_believed(run: Run, name: str, lie: Lie, complaint: str) -> None:
    version = await world(run, [mesh(rank) for rank in range(12)])
    manifest = await run.manifest(version)
    index = tuple(lie(entry) if entry.name == name else entry for entry in manifest.index or ())
    await run.backend.put(manifest_key(version), encode(msgspec.structs.replace(manifest, index=index)))
    async with await CheckpointReader.open(run, version) as reader:
        entry = await reader.find(name)
        assert entry is not None
        wanted = region(entry.shape, Box((0, 0), (5, 5)) if len(entry.shape) == 2 else None)
        with pytest.raises(IntegrityError, match=complaint):
            await reader.locate(name, wanted)
    assert not (await verify(run, version)).good


async def test_where_a_piece_lies_is_what_its_receipt_says(run: Run) -> None:
    version = await world(run, [mesh(rank) for rank in range(12)])
    manifest = await run.manifest(version)
    moved = tuple(
        msgspec.structs.replace(e, pieces=tuple(msgspec.structs.replace(p, at=p.at + 4) for p in e.pieces))
        for e in manifest.index or ()
    )
    lying = msgspec.structs.replace(manifest, index=moved)
    async with await CheckpointReader.open(run, version) as reader, CheckpointReader(run, lying) as misled:
        assert await misled.locate("flat", region((5, 5))) == await reader.locate("flat", region((5, 5)))


def test_a_grid_of_countless_cells_is_not_walked_over() -> None:
    wanted = Region((Box((0, 0), (2**30, 2**30)),))
    for ranks in (RankRun(0, 100_000, 1), 0, 1):
        entry = IndexEntry(
            dtype="uint8", grid=Grid(chunks=(1, 1), ranks=ranks), name="w", pieces=(), shape=(2**30, 2**30)
        )
        with pytest.raises(CoverageError, match="a grid"):
            sought(entry, ((0, 1, 2),), wanted, 100_000)
    # What is in order costs what is wanted of it.
    entry = IndexEntry(
        dtype="uint8",
        grid=Grid(chunks=(2**40,), ranks=RankRun(0, 100_000, 1)),
        name="w",
        pieces=(),
        shape=(2**40 * 100_000,),
    )
    found = sought(entry, (), Region((Box((2**40 * 7 - 1,), (2,)),)), 100_000)
    assert found == {6: [((2**40 * 6,), (2**40,))], 7: [((2**40 * 7,), (2**40,))]}


@settings(max_examples=100)
@given(st.data())
def test_listed_pieces_and_a_grid_of_them_are_the_same(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    chunks = tuple(data.draw(st.integers(1, size)) for size in shape)
    counts = [-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)]
    pieces = []
    for rank, index in enumerate(itertools.product(*map(range, counts))):
        offsets = tuple(i * chunk for i, chunk in zip(index, chunks, strict=True))
        lengths = tuple(min(c, n - o) for c, n, o in zip(chunks, shape, offsets, strict=True))
        pieces.append(IndexPiece(at=0, box=Box(offsets, lengths), bytes=0, rank=rank))
    run_of = RankRun(0, len(pieces), 1)
    grid = IndexEntry(dtype="uint8", grid=Grid(chunks=chunks, ranks=run_of), name="w", pieces=(), shape=shape)
    listed = IndexEntry(dtype="uint8", name="w", pieces=tuple(data.draw(st.permutations(pieces))), shape=shape)
    low = tuple(data.draw(st.integers(0, size)) for size in shape)
    wanted = region(shape, Box(low, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, low, strict=True))))
    assert sought(grid, (), wanted, 10**5) == sought(listed, (), wanted, 10**5)


async def test_a_manifest_of_many_ranks_is_small(run: Run) -> None:
    version = Version(10, await open_generation(run, world=600))
    states = [
        State([Held("w", (600, 2), pattern(8), box=Box((rank, 0), (1, 2)))], {"rank": rank}) for rank in range(600)
    ]
    receipts = [await write_rank(run, version, state, rank=i, world=600) for i, state in enumerate(states)]
    manifest: Manifest = await commit(run, receipts)
    assert len(encode(manifest)) < 1500
    assert len(manifest.receipt_parts) == 3
    async with await CheckpointReader.open(run, version) as reader:
        (piece,) = await reader.locate("w", region((600, 2), Box((599, 1), (1, 1))))
        assert piece.rank == 599
