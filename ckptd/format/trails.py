"""Which rank has saved which cell of a grid, in the order of the ranks, for many tensors at once.

A trail is a sequence of steps, each a cell and the rank that saved it. Tensors with the same history share their trail,
and those whose histories part share its beginning, so a model of any number of tensors that are cut alike costs one
step for each rank.
"""

from __future__ import annotations

from array import array
from collections import defaultdict

from ckptd.format.grid import compact


class Trails:
    """Trails that share their beginnings. A trail is the number of its last step; -1 is the empty one."""

    def __init__(self) -> None:
        self._before = array("q")
        self._ranks = array("i")
        self._cells = array("q")
        self._new: dict[tuple[int, int, int], int] = {}
        self._walked: dict[int, Walked] = {}

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

    def walk(self, trail: int) -> Walked:
        found = self._walked.get(trail)
        if found is None:
            steps: list[tuple[int, int]] = []
            at = trail
            while at >= 0:
                steps.append((self._cells[at], self._ranks[at]))
                at = self._before[at]
            found = self._walked[trail] = Walked(steps)
        return found


class Walked:
    """A trail from end to end."""

    def __init__(self, steps: list[tuple[int, int]]) -> None:
        steps.sort()
        self.holders: dict[int, list[int]] = defaultdict(list)
        """Cell → the ranks that have saved it, the lowest first."""
        for cell, rank in steps:
            self.holders[cell].append(rank)
        self.doubled = {cell: ranks for cell, ranks in self.holders.items() if len(ranks) > 1}
        self.exact = all(len(set(ranks)) == len(ranks) for ranks in self.doubled.values())
        """No rank has saved a cell twice."""
        self.ranks = compact([ranks[0] for ranks in self.holders.values()])
