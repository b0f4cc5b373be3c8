"""Who saves what several ranks hold: each row once, whatever there is, and in equal shares."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from ckptd.limits import MIB
from ckptd_client.capture.owners import CUT_BYTES_MIN, OWNERS_MAX, Item, staged

sizes = st.tuples(st.integers(0, 40), st.integers(0, 3 * MIB) | st.integers(0, 64))
lines = st.lists(sizes, max_size=12).map(
    lambda found: [Item(f"t{i:02}", rows, rows * row_bytes) for i, (rows, row_bytes) in enumerate(found)]
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Ranks that hold the same, and the node of each rank of the world."""
    nodes = draw(st.lists(st.integers(0, 5), min_size=2, max_size=90))
    replicas = draw(st.sets(st.integers(0, len(nodes) - 1), min_size=1))
    return sorted(replicas), nodes


@given(lines, worlds())
def test_every_row_is_owned_once(items: list[Item], world: tuple[list[int], list[int]]) -> None:
    replicas, nodes = world
    owned: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(items))}
    owners: set[int] = set()
    for rank in replicas:
        share = staged(items, replicas, nodes, rank, resident=False, check=False)
        assert not share.resident
        for cut in share.owned:
            owned[cut.item].append((cut.start, cut.stop))
            owners.add(rank)
    assert len(owners) <= OWNERS_MAX
    for number, item in enumerate(items):
        pieces = sorted(owned[number])
        assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces)][:-1]
        assert pieces[-1][1] == item.rows
        if len(pieces) > 1:
            assert min(stop - start for start, stop in pieces) * item.row_bytes >= CUT_BYTES_MIN


@given(lines, worlds())
def test_every_node_has_every_row_once_in_memory(items: list[Item], world: tuple[list[int], list[int]]) -> None:
    replicas, nodes = world
    for node in {nodes[rank] for rank in replicas}:
        held: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(items))}
        for rank in replicas:
            if nodes[rank] == node:
                share = staged(items, replicas, nodes, rank, resident=True, check=False)
                for cut in (*share.owned, *share.resident):
                    held[cut.item].append((cut.start, cut.stop))
        for number, item in enumerate(items):
            pieces = sorted(held[number])
            assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces)][:-1]
            assert pieces[-1][1] == item.rows


@given(lines, worlds())
def test_with_a_check_every_rank_has_every_row_once_in_the_owners_pieces(
    items: list[Item], world: tuple[list[int], list[int]]
) -> None:
    replicas, nodes = world
    all_of_them = [staged(items, replicas, nodes, rank, resident=True, check=True) for rank in replicas]
    owned = sorted((cut.item, cut.start, cut.stop) for share in all_of_them for cut in share.owned)
    for share in all_of_them:
        assert sorted((cut.item, cut.start, cut.stop) for cut in (*share.owned, *share.resident)) == owned


def shares_of(items: list[Item], replicas: list[int], nodes: list[int]) -> list[int]:
    """Bytes that each of the ranks owns."""
    found = [staged(items, replicas, nodes, rank, resident=False, check=False).owned for rank in replicas]
    return [sum((cut.stop - cut.start) * items[cut.item].row_bytes for cut in share) for share in found]


def test_many_tensors_are_shared_out_evenly() -> None:
    sizes = random.Random(0)
    items = [Item(f"t{i}", 64, 64 * sizes.randint(1, 64) * 1024) for i in range(400)]
    shares = shares_of(items, list(range(8)), [0] * 8)
    assert max(shares) <= 1.1 * sum(shares) / 8


def test_one_large_tensor_is_cut_in_equal_shares() -> None:
    shares = shares_of([Item("t", 1000, 1000 * 64 * 1024)], list(range(7)), [0] * 7)
    assert max(shares) - min(shares) <= 64 * 1024


def test_small_tensors_stay_whole() -> None:
    items = [Item("a", 100, MIB), Item("b", 1, 3 * MIB), Item("c", 0, 0)]
    for share in (staged(items, [0, 1, 2], [0] * 3, rank, resident=False, check=False) for rank in range(3)):
        assert all((cut.start, cut.stop) == (0, items[cut.item].rows) for cut in share.owned)


def test_nodes_own_equal_sections_whatever_their_ranks() -> None:
    items = [Item(f"t{i:03}", 1, 100_000) for i in range(120)]
    shares = shares_of(items, [0, 1, 2, 3], [0, 1, 1, 1])
    assert shares[0] == 6_000_000
    assert shares[1:] == [2_000_000] * 3


def test_owners_are_bounded_and_spread_over_a_large_world() -> None:
    ranks = list(range(1000))
    shares = shares_of([Item("t", 10_000, 10_000 * MIB)], ranks, [rank // 8 for rank in ranks])
    owners = [rank for rank, share in zip(ranks, shares, strict=True) if share]
    assert len(owners) == OWNERS_MAX
    assert max(owners) - min(owners) > 900
