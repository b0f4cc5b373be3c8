"""The rules of a commit of any layout: equal parts count once, replicas are compared, equal values of the ranks' own
are the world's; and keeping tensors small changes none of it."""

from __future__ import annotations

import base64
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import CkptdError, CoverageError
from ckptd.format import gather, index, proof
from ckptd.format.digests import hex_digest
from ckptd.format.proof import Proof, prove
from ckptd.format.records import Box, Common, Grid, Index, IndexEntry, RankRun, ReceiptList, Span, decode, encode
from tests.format.saved import Held, Rank, changed

Where = Box | Span | None


def part(where: Where, data: bytes, name: str = "w", shape: tuple[int, ...] = (8,), **more: Any) -> Held:
    """One piece of a tensor of bytes."""
    return Held(name, "uint8", shape, [(where, data)], **more)


def world(*ranks: Sequence[Held], **more: Any) -> list[bytes]:
    return [Rank(held, rank=rank, world=len(ranks), **more).receipt() for rank, held in enumerate(ranks)]


def entries(receipts: Sequence[bytes]) -> dict[str, IndexEntry]:
    return {entry.name: entry for entry in prove(receipts).manifest.index or ()}


def refused(receipts: Sequence[bytes], message: str) -> None:
    with pytest.raises(CoverageError, match=message):
        prove(receipts)


SEEN = Held("w", "uint8", (8,))
LEFT, RIGHT = Box((0,), (4,)), Box((4,), (4,))


# Equal parts


@pytest.mark.parametrize("where", [None, Box((0,), (8,)), Span(0, 8)])
def test_a_part_that_several_ranks_saved_counts_once_as_the_lowest_ranks(where: Where) -> None:
    found = entries(world([SEEN], [part(where, b"12345678")], [SEEN], [part(None, b"12345678")]))["w"]
    assert found.grid == Grid(chunks=(8,), ranks=RankRun(1, 2, 1))
    assert found.pieces == ()


def test_every_part_counts_once_of_itself() -> None:
    left, right = part(LEFT, b"1234"), part(RIGHT, b"5678")
    assert entries(world([right], [left], [left], [right]))["w"].grid == Grid(chunks=(4,), ranks=0)
    assert prove(world([right], [left], [left], [right])).manifest.rank_lists == ((1, 0),)
    flat = [part(Span(0, 3), b"123"), part(Span(3, 8), b"45678"), part(Span(0, 3), b"123")]
    listed = entries(world(*([held] for held in flat)))["w"]
    assert [(piece.rank, piece.span) for piece in listed.pieces] == [(0, Span(0, 3)), (1, Span(3, 8))]


def test_different_values_of_the_same_part_are_refused() -> None:
    refused(
        world([part(None, b"12345678")], [SEEN], [part(None, b"12345679")]), "w: ranks 0 and 2 hold different values"
    )
    left = part(LEFT, b"1234")
    refused(world([left], [part(RIGHT, b"5678")], [part(RIGHT, b"5678")], [part(LEFT, b"123x")]), "w: ranks 0 and 3")
    refused(world([left], [left]), "w: 4 of 8 elements are covered, by ranks")


def test_other_overlaps_stay_errors() -> None:
    refused(world([part(None, b"12345678")], [part(LEFT, b"1234")]), "w: ranks 0 and 1 both hold")
    refused(
        world(
            [part(LEFT, b"1234")],
            [
                part(Span(0, 4), b"1234"),
            ],
            [part(RIGHT, b"5678")],
        ),
        "both hold",
    )
    twice = Held("w", "uint8", (8,), [(None, b"12345678"), (None, b"12345678")])
    refused(world([twice]), "w: ranks 0 and 0 both hold")
    refused(world([twice], [part(None, b"12345678")]), "both hold")


def test_blocks_of_other_lengths_compare_only_what_is_one_block() -> None:
    small, large = bytes(range(8)), bytes(100_000)
    for size, data in ((8, small), (100_000, large)):
        ranks = [Rank([part(None, data, shape=(size,))], rank=rank, world=2) for rank in range(2)]
        receipts = [ranks[0].receipt(), replace(ranks[1], block_bytes=65536).receipt()]
        if size == 8:
            assert entries(receipts)["w"].grid is not None
        else:
            refused(receipts, "w: ranks 0 and 1 both saved .* with blocks of other lengths")
    own = [Rank([part(None, large, shape=(100_000,), per_rank=True)], rank=rank, world=2) for rank in range(2)]
    assert entries([own[0].receipt(), own[1].receipt()]).keys() == {"w"}
    assert not entries([own[0].receipt(), replace(own[1], block_bytes=65536).receipt()])


# Replicas


def resident(where: Where, data: bytes, *more: tuple[Where, bytes]) -> Held:
    return Held("w", "uint8", (8,), resident=[(where, data), *more])


def test_replicas_are_compared_where_that_is_asked_for() -> None:
    owner = [part(LEFT, b"1234")], [part(RIGHT, b"5678")]
    good, bad = resident(LEFT, b"1234", (RIGHT, b"5678")), resident(LEFT, b"1234", (RIGHT, b"567x"))
    assert entries(world(*owner, [good], check_replicas=True))["w"].grid == Grid(chunks=(4,), ranks=RankRun(0, 2, 1))
    refused(world(*owner, [bad], check_replicas=True), "w: ranks 1 and 2 hold different values of the same part")
    refused(world([bad], *owner, check_replicas=True), "w: ranks 0 and 2 hold different values of the same part")
    refused(world([good], [bad], *owner, check_replicas=True), "w: ranks 0 and 1 hold different values")
    prove(world(*owner, [bad]))  # nobody asked


def test_replicas_that_are_cut_otherwise_are_not_compared() -> None:
    owner = [part(LEFT, b"1234")], [part(RIGHT, b"5678")]
    prove(world(*owner, [resident(None, b"xxxxxxxx")], check_replicas=True))
    prove(world(*owner, [resident(Span(0, 4), b"xxxx")], check_replicas=True))


def test_resident_pieces_are_no_cover() -> None:
    refused(world([part(LEFT, b"1234")], [resident(RIGHT, b"5678")], check_replicas=True), "w: 4 of 8 elements")


def test_all_ranks_agree_whether_replicas_are_compared() -> None:
    ranks = [Rank([part(None, b"12345678")]), Rank([SEEN], rank=1)]
    receipts = [replace(rank, world=2, check_replicas=rank.rank == 1).receipt() for rank in ranks]
    refused(receipts, "ranks 0 and 1 disagree on check_replicas")


def test_digests_of_resident_pieces_are_there_if_and_only_if_they_are_compared() -> None:
    one = Rank([part(None, b"12345678"), replace(resident(None, b"12345678"), name="v")], check_replicas=True)
    receipts = world(one.tensors, [Held("v", "uint8", (8,), [(None, b"12345678")])], check_replicas=True)
    prove(receipts)
    sixteen = base64.b64encode(bytes(16)).decode()
    for value in ("", base64.b64encode(bytes(32)).decode()):
        refused([changed(receipts[0], "shard/resident_blocks", value), receipts[1]], "size or digests do not fit")
    bare = world(one.tensors, [Held("v", "uint8", (8,), [(None, b"12345678")])])
    prove(bare)
    refused([changed(bare[0], "shard/resident_blocks", sixteen), bare[1]], "size or digests do not fit")


# Values of the ranks' own


def own(data: bytes, where: Where = None) -> Held:
    return Held("w", "uint8", (len(data),), [(where, data)], per_rank=True)


def test_an_own_value_that_is_equal_on_all_that_have_it_is_the_worlds() -> None:
    same = entries(world([own(b"123")], [own(b"123")], [], [own(b"123", Box((0,), (3,)))]))
    assert same["w"].grid == Grid(chunks=(3,), ranks=RankRun(0, 1, 1))
    assert entries(world([], [], [own(b"123")]))["w"].grid == Grid(chunks=(3,), ranks=RankRun(2, 3, 1))
    assert entries(world([own(b"123")]))["w"].grid is not None
    assert prove(world([own(b"123")]), early=True).manifest.index == ()


@pytest.mark.parametrize(
    "other",
    [
        own(b"124"),
        own(b"1234"),
        Held("w", "int8", (3,), [(None, b"123")], per_rank=True),
        Held("w", "uint8", (3, 1), [(None, b"123")], per_rank=True),
        Held("w", "uint8", (3,), [(Span(0, 1), b"1"), (Span(1, 3), b"23")], per_rank=True),
    ],
)
def test_an_own_value_that_differs_anywhere_is_nobody_elses(other: Held) -> None:
    for ranks in itertools.permutations([[own(b"123")], [other], [own(b"123")]]):
        assert not entries(world(*ranks))
    assert entries(world([other], [other])).keys() == {"w"}


def test_empty_pieces_never_appear() -> None:
    shape = (0, 3)
    empty = Held("w", "uint8", shape, [(None, b"")])
    none_of_it = Held("v", "uint8", (4,), [(Span(0, 0), b"")])
    found = entries(world([empty, Held("v", "uint8", (4,), [(None, b"1234")])], [empty, none_of_it]))
    assert (found["w"].pieces, found["w"].grid) == ((), None)
    assert found["v"].grid == Grid(chunks=(4,), ranks=RankRun(0, 1, 1))
    assert entries(world([replace(empty, per_rank=True)], [replace(empty, per_rank=True)]))["w"].pieces == ()


# Any world, kept in any way


@st.composite
def worlds(draw: st.DrawFn) -> list[list[Held]]:
    """Tensors cut in all ways over up to twelve ranks, some parts saved twice, sometimes with a part lost or
    changed."""
    count = draw(st.integers(1, 12))
    ranks: list[list[Held]] = [[] for _ in range(count)]
    for name in ("a", "b", "c"):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=2)))
        chunks = tuple(draw(st.integers(1, size)) for size in shape)
        starts = [range(0, size, chunk) for size, chunk in zip(shape, chunks, strict=True)]
        boxes = [
            Box(o, tuple(min(c, n - at) for c, n, at in zip(chunks, shape, o, strict=True)))
            for o in itertools.product(*starts)
        ]
        if draw(st.booleans()):  # merge two: no grid any more, or another
            boxes = _with_a_bite(boxes)
        turn, step = draw(st.integers(0, count)), draw(st.integers(0, 3))
        held: dict[int, list[tuple[Where, bytes]]] = {}
        for number, box in enumerate(boxes):
            data = bytes((i + number) % 251 for i in range(_count(box)))
            holders = {(turn + step * number) % count}
            if draw(st.integers(0, 7)) == 0:
                holders.add(draw(st.integers(0, count - 1)))
            for rank in holders:
                fate = draw(st.integers(0, 60))
                if fate != 0:
                    held.setdefault(rank, []).append((box, bytes(len(data)) if fate == 1 else data))
        for rank, pieces in held.items():
            ranks[rank].append(Held(name, "uint8", shape, pieces))
    return ranks


def _count(box: Box) -> int:
    count = 1
    for length in box.lengths:
        count *= length
    return count


def _with_a_bite(boxes: list[Box]) -> list[Box]:
    """The first two boxes as one, where they lie in one line."""
    if len(boxes) < 2 or boxes[0].offsets[:-1] != boxes[1].offsets[:-1]:
        return boxes
    length = boxes[0].lengths[-1] + boxes[1].lengths[-1]
    return [Box(boxes[0].offsets, (*boxes[0].lengths[:-1], length)), *boxes[2:]]


def outcome(receipts: Sequence[bytes], trail_from: int) -> Any:
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gather, "TRAIL_FROM_PIECES", trail_from)
            commit = prove(receipts)
    except CkptdError as error:
        return type(error)
    return encode(commit.manifest), dict(commit.objects)


def whole_index(receipts: Sequence[bytes]) -> dict[str, list[tuple[Box, int]]]:
    """What the first of equal parts make, by brute force; raises where elements are not covered exactly once."""
    held: dict[str, dict[str, tuple[Box, int]]] = {}
    shapes: dict[str, list[int]] = {}
    for rank, data in enumerate(receipts):
        for entry in json.loads(data)["snapshot"]["layout"]["tensors"]:
            shapes[entry["name"]] = entry["shape"]
            for piece in entry["pieces"]:
                box = Box(tuple(piece["box"]["offsets"]), tuple(piece["box"]["lengths"]))
                held.setdefault(entry["name"], {}).setdefault(repr(box), (box, rank))
    return {name: sorted(found.values(), key=lambda item: item[0].offsets) for name, found in held.items()}


@settings(max_examples=250)
@given(worlds())
def test_how_tensors_are_kept_does_not_show(ranks: list[list[Held]]) -> None:
    receipts = world(*ranks)
    outcomes = [outcome(receipts, trail_from) for trail_from in (1, 2, 3, 8, 1000)]
    assert all(found == outcomes[0] for found in outcomes), outcomes
    if isinstance(outcomes[0], type):
        return
    expected = whole_index(receipts)
    manifest = prove(receipts).manifest
    for entry in manifest.index or ():
        if entry.grid is None:
            assert [(p.box, p.rank) for p in sorted(entry.pieces, key=lambda p: p.box.offsets)] == expected[entry.name]  # type: ignore[union-attr]
        else:
            run = entry.grid.ranks
            found = list(range(run.start, run.stop, run.step)) if isinstance(run, RankRun) else manifest.rank_lists[run]
            assert list(found) == [rank for _, rank in expected[entry.name]]


def test_a_grid_that_ends_otherwise_is_looked_up_again() -> None:
    """Rows of two over twelve ranks, and of three on the last: what is known of the first ones is where they lie."""
    rows = [Box((2 * rank,), (2 if rank < 12 else 3,)) for rank in range(13)]
    receipts = world(*([part(box, bytes(box.lengths[0]), shape=(27,))] for box in rows))
    asked: list[int] = []

    class Noting(Proof):
        def look(self, rank: int, data: bytes) -> None:
            asked.append(rank)
            super().look(rank, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "Proof", Noting)
        found = entries(receipts)["w"]
    assert [piece.rank for piece in found.pieces] == list(range(13))
    assert asked == list(range(12))
    assert [(piece.at, piece.box) for piece in found.pieces] == [(4096, box) for box in rows]


def test_a_receipt_that_changed_between_two_looks_is_noticed() -> None:
    receipts = world([part(None, b"12345678")], [part(None, b"12345678")])
    found = Proof(2)
    for data in receipts:
        found.add(data)
    assert found.questions() == [0, 1]
    with pytest.raises(CoverageError, match="receipt of rank 1 has changed"):
        found.look(1, receipts[0])


def test_a_proof_that_is_not_complete_commits_nothing() -> None:
    found = Proof(2)
    found.add(world([part(None, b"12345678")], [SEEN])[0])
    with pytest.raises(CoverageError, match="1 of 2 receipts"):
        found.commit()


# Sizes


def sharded(world_: int, tensors: int, turn: int = 0) -> list[bytes]:
    """Every tensor cut over all ranks by rows; ``turn``: a rank's row is that many further."""
    return world(
        *(
            [part(Box(((rank + turn * i) % world_,), (1,)), b"x", f"t{i:04d}", (world_,)) for i in range(tensors)]
            for rank in range(world_)
        )
    )


def test_an_index_grows_with_ranks_and_tensors_and_not_with_their_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "INDEX_INLINE_BYTES_MAX", 0)

    def size(world_: int, tensors: int, turn: int) -> int:
        objects = prove(sharded(world_, tensors, turn)).objects
        return sum(len(data) for key, data in objects.items() if "/index-" in key)

    assert abs(size(60, 40, 0) - size(30, 40, 0)) < 40 * 4
    # The same list for all but the first, named by number.
    lists = [decode(data, Index).rank_lists for key, data in prove(sharded(60, 2, 7)).objects.items() if "index" in key]
    assert [len(found) for part_ in lists for found in part_] == [60]
    assert size(60, 40, 0) < 60 * 5 + 40 * 120


def test_lists_of_ranks_are_named_once_in_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    receipts = world(
        *([part(Box(((rank + 1) % 9,), (1,)), b"x", f"t{i}", (9,)) for i in range(6)] for rank in range(9))
    )
    manifest = prove(receipts).manifest
    assert manifest.rank_lists == ((8, 0, 1, 2, 3, 4, 5, 6, 7),)
    assert {entry.grid.ranks for entry in manifest.index or () if entry.grid} == {0}
    monkeypatch.setattr(index, "INDEX_INLINE_BYTES_MAX", 400)
    monkeypatch.setattr(index, "INDEX_PART_BYTES_TARGET", 250)
    commit = prove(receipts)
    parts = [decode(commit.objects[ref.key], Index) for ref in commit.manifest.index_parts]
    assert [(len(found.tensors), found.rank_lists) for found in parts] == [(2, manifest.rank_lists)] * 3
    assert commit.manifest.rank_lists == ()


def test_receipts_lie_in_parts_above_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    receipts = sharded(7, 1)
    listed = prove(receipts).manifest.receipts
    monkeypatch.setattr(proof, "RECEIPTS_INLINE_MAX", 7)
    assert prove(receipts).manifest.receipt_parts == ()
    monkeypatch.setattr(proof, "RECEIPTS_INLINE_MAX", 3)
    commit = prove(receipts)
    assert commit.manifest.receipts == ()
    found = [decode(commit.objects[ref.key], ReceiptList) for ref in commit.manifest.receipt_parts]
    assert [len(part_.receipts) for part_ in found] == [3, 3, 1]
    assert tuple(ref for part_ in found for ref in part_.receipts) == listed
    for ref in commit.manifest.receipt_parts:
        assert (ref.bytes, ref.digest) == (len(commit.objects[ref.key]), hex_digest(commit.objects[ref.key]))


def test_the_common_record_is_vouched_for_and_one_rank_has_none() -> None:
    ranks = [
        Rank(rank=rank, world=2, tree={"$": "dict", "v": [["a", rank], ["b", 1]]}, aliases={}) for rank in range(2)
    ]
    commit = prove([rank.receipt() for rank in ranks])
    ref = commit.manifest.common
    assert ref is not None
    data = commit.objects[ref.key]
    assert (ref.bytes, ref.digest) == (len(data), hex_digest(data))
    tree = msgspec.json.decode(decode(data, Common).tree)
    assert tree == {"$": "dict", "v": [["a", {"$": "per_rank"}], ["b", 1]]}
    assert prove([Rank().receipt()]).manifest.common is None


@pytest.mark.parametrize("seed", range(3))
def test_uneven_rows_over_any_number_of_ranks_are_a_grid(seed: int) -> None:
    order = random.Random(seed)
    for rows, ranks in itertools.product(range(1, 10), range(1, 7)):
        each = -(-rows // ranks)
        cuts = [(min(rank * each, rows), min((rank + 1) * each, rows)) for rank in range(ranks)]
        order.shuffle(cuts)
        held = [[part(Box((a, 0), (b - a, 2)), bytes(2 * (b - a)), shape=(rows, 2))] for a, b in cuts]
        found = entries(world(*held))["w"]
        assert found.grid is not None
        assert found.grid.chunks == (each, 2)
