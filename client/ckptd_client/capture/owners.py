"""Who saves which rows of what several ranks hold alike. Pure arithmetic: every one of these ranks comes to the same
result by itself.

The parts are laid end to end in order of name, and the line of bytes is cut in equal shares. A tensor is cut between
rows of its first dimension, and only where a mebibyte or more remains on both sides; else it goes as a whole to the
share in which its middle lies.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptd.limits import MIB

T = TypeVar("T")

OWNERS_MAX = 64
"""So many ranks at most own a share of what all of them hold, so that a reader of everything opens a bounded number of
shards, in a world of any size."""
CUT_BYTES_MIN = MIB
"""No cut leaves less than this on either side of it."""


@dataclass(frozen=True, slots=True)
class Item:
    """Something that all of the ranks hold: rows of equal size."""

    name: str
    rows: int
    bytes: int

    @property
    def row_bytes(self) -> int:
        return self.bytes // max(self.rows, 1)


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows ``start`` to ``stop`` of the item of that number."""

    item: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Staged:
    """What one rank copies: what it owns, which is written, and what it keeps in its node's memory beside that."""

    owned: tuple[Cut, ...]
    resident: tuple[Cut, ...]


def staged(
    items: Sequence[Item], replicas: Sequence[int], nodes: Sequence[int], rank: int, *, resident: bool, check: bool
) -> Staged:
    """What ``rank``, one of ``replicas``, copies of the items.

    ``nodes``: for each rank of the world the number of its node. ``resident``: what another node owns is kept on this
    one as well, once. ``check``: each rank copies everything.
    """
    owners, bounds = _owners(replicas, nodes)
    shares = cut(items, bounds, sum(item.bytes for item in items))
    owned = next((share for owner, share in zip(owners, shares, strict=True) if owner == rank), ())
    if check:
        others = [c for owner, share in zip(owners, shares, strict=True) if owner != rank for c in share]
        return Staged(tuple(owned), tuple(others))
    here = [other for other in replicas if nodes[other] == nodes[rank]]
    if not resident or len(here) == len(replicas):
        return Staged(tuple(owned), ())
    away = [c for owner, share in zip(owners, shares, strict=True) if nodes[owner] != nodes[rank] for c in share]
    return Staged(tuple(owned), tuple(_dealt(items, away, len(here))[here.index(rank)]))


Bound = tuple[int, int]
"""A place on the line, as a fraction of its length: numerator and denominator."""


def _owners(replicas: Sequence[int], nodes: Sequence[int]) -> tuple[list[int], list[Bound]]:
    """The ranks that own a share, in order of the line, and where the shares end: each node has as much as another,
    and within a node each rank."""
    by_node: dict[int, list[int]] = {}
    for rank in replicas:
        by_node.setdefault(nodes[rank], []).append(rank)
    of_nodes = _evenly([by_node[node] for node in sorted(by_node)], OWNERS_MAX)
    of_each = OWNERS_MAX // len(of_nodes)
    owners: list[int] = []
    bounds: list[Bound] = []
    for number, ranks in enumerate(of_nodes):
        chosen = _evenly(ranks, of_each)
        owners += chosen
        bounds += [(number * len(chosen) + i + 1, len(of_nodes) * len(chosen)) for i in range(len(chosen))]
    return owners, bounds


def _evenly(values: Sequence[T], at_most: int) -> list[T]:
    count = min(len(values), at_most)
    return [values[i * len(values) // count] for i in range(count)]


def cut(items: Sequence[Item], bounds: Sequence[Bound], line_bytes: int) -> list[list[Cut]]:
    """The share before each bound. Each row of each item is in exactly one; an item without rows too."""
    stops = [line_bytes * numerator // denominator for numerator, denominator in bounds]
    shares: list[list[Cut]] = [[] for _ in stops]
    at = 0
    for number, item in enumerate(items):
        rows = [0, *_cuts(item, at, stops), item.rows]
        for start, stop in itertools.pairwise(rows):
            middle = at + (start + stop) * item.row_bytes // 2
            share = min(bisect_right(stops, middle), len(stops) - 1)
            shares[share].append(Cut(number, start, stop))
        at += item.bytes
    return shares


def _cuts(item: Item, at: int, stops: Sequence[int]) -> list[int]:
    """The rows before which an item that begins at ``at`` is cut."""
    if item.bytes < 2 * CUT_BYTES_MIN:
        return []
    found: list[int] = []
    last = 0
    for stop in stops[bisect_right(stops, at) : bisect_right(stops, at + item.bytes)]:
        row = (2 * (stop - at) + item.row_bytes) // (2 * item.row_bytes)  # the nearest
        before, behind = (row - last) * item.row_bytes, (item.rows - row) * item.row_bytes
        if before >= CUT_BYTES_MIN and behind >= CUT_BYTES_MIN:
            found.append(row)
            last = row
    return found


def _dealt(items: Sequence[Item], cuts: Sequence[Cut], hands: int) -> list[list[Cut]]:
    """Equal shares of cuts. None is cut again, so that its digests are those of its owner."""
    pieces = [Item("", 1, (c.stop - c.start) * items[c.item].row_bytes) for c in cuts]
    bounds = [(hand + 1, hands) for hand in range(hands)]
    return [[cuts[c.item] for c in share] for share in cut(pieces, bounds, sum(piece.bytes for piece in pieces))]
