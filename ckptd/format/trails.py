"""Which rank has saved which cell of a grid, in the order of the ranks, for many tensors at once.

A trail is a sequence of steps, each a cell and the rank that saved it. Tensors with the same history share their trail,
and those whose histories part share its beginning, so a model of any number of tensors that are cut alike costs one
step for each rank.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator

from ckptd.format.grid import compact


class Trails:
    """Trails that share their beginnings. A trail is the number of its last step; -1 is the empty one."""

    def __init__(self) -> None:
        self._before = array("q")
        self._ranks = array("i")
        self._cells = array("q")
        self._new: dict[tuple[int, int, int], int] = {}
        self._walked: dict[int, Walked] = {}
        self._ranks_on: dict[int, frozenset[int]] = {}

    def begin(self, rank: int) -> None:
        """The next rank comes: what trails have gone before goes on from no more."""
        self._new.clear()

    def step(self, trail: int, rank: int, cell: int) -> int:
        """The trail that goes on from ``trail`` by a cell of a rank."""
        key = (trail, rank, cell)
        found = self._new.get(key)
        if found is None:
            found = self._new[key] = len(self._cells)
            self._before.append(trail)
            self._ranks.append(rank)
            self._cells.append(cell)
        return found

    def ranks(self, trail: int) -> frozenset[int]:
        """All ranks on a trail; the same object for all that ask for it."""
        found = self._ranks_on.get(trail)
        if found is None:
            found = self._ranks_on[trail] = frozenset(rank for _, rank in self._steps(trail))
        return found

    def walk(self, trail: int) -> Walked:
        found = self._walked.get(trail)
        if found is None:
            found = self._walked[trail] = Walked(sorted(self._steps(trail)))
        return found

    def _steps(self, trail: int) -> Iterator[tuple[int, int]]:
        while trail >= 0:
            yield self._cells[trail], self._ranks[trail]
            trail = self._before[trail]


class Walked:
    """A trail from end to end."""

    def __init__(self, steps: list[tuple[int, int]]) -> None:
        self.holders: dict[int, list[int]] = defaultdict(list)
        """Cell → the ranks that have saved it, the lowest first."""
        for cell, rank in steps:
            self.holders[cell].append(rank)
        self.doubled = {cell: ranks for cell, ranks in self.holders.items() if len(ranks) > 1}
        self.exact = all(len(set(ranks)) == len(ranks) for ranks in self.doubled.values())
        """No rank has saved a cell twice."""
        self.ranks = compact([ranks[0] for ranks in self.holders.values()])
