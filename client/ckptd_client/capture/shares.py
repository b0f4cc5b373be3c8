"""What this rank copies of what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ckptd_client.capture.owners import Item, staged
from ckptd_client.capture.parts import Part, holds_nothing


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks are, and what each keeps in memory."""

    rank: int = 0
    world: int = 1
    nodes: tuple[int, ...] = ()
    """For each rank the number of its node; empty: all are on one."""
    resident: bool = True
    """What several nodes hold alike is kept in the memory of each."""
    check: bool = False
    """Every rank copies all that it holds, so that replicas can be compared."""


class Share(msgspec.Struct, frozen=True, gc=False):
    """Rows of one piece of what is held; none of any, where other ranks own all of it."""

    piece: int
    """Its number in :meth:`Part.each`; -1 for nothing."""
    start: int = 0
    stop: int = 0
    resident: bool = False

    def of(self, part: Part) -> Part:
        """That share of a part."""
        if self.piece < 0:
            return holds_nothing(part.local, part.shape)
        return part.each()[self.piece].cut(self.start, self.stop)


_NOTHING = [Share(-1)]


def share_out(held: Sequence[tuple[str, Part]], placement: Placement) -> list[list[Share]]:
    """For each tensor what this rank copies of it: its own, and its share of what other ranks hold as well."""
    shares: list[list[Share]] = [[] for _ in held]
    lines: dict[tuple[int, ...], list[int]] = {}
    for number, (_, part) in enumerate(held):
        if len(part.replicas) < 2 or placement.rank not in part.replicas:
            shares[number] = _all_of(part)
        elif part.led:
            shares[number] = _all_of(part) if placement.rank == part.replicas[0] else []
        else:
            lines.setdefault(part.replicas, []).append(number)
    for replicas, numbers in lines.items():
        _share_line(held, sorted(numbers, key=lambda number: held[number][0]), replicas, placement, shares)
    return [of_tensor if any(not s.resident for s in of_tensor) else [*_NOTHING, *of_tensor] for of_tensor in shares]


def _all_of(part: Part) -> list[Share]:
    return [Share(number, 0, piece.rows) for number, piece in enumerate(part.each())]


def _share_line(
    held: Sequence[tuple[str, Part]],
    numbers: Sequence[int],
    replicas: tuple[int, ...],
    placement: Placement,
    shares: list[list[Share]],
) -> None:
    """Share out what the same ranks hold alike."""
    line = [(number, i, piece) for number in numbers for i, piece in enumerate(held[number][1].each())]
    items = [Item(held[number][0], piece.rows, piece.local.nbytes) for number, _, piece in line]
    nodes = placement.nodes or (0,) * (replicas[-1] + 1)
    found = staged(items, replicas, nodes, placement.rank, resident=placement.resident, check=placement.check)
    for cuts, resident in ((found.owned, False), (found.resident, True)):
        for cut in cuts:
            number, i, _ = line[cut.item]
            shares[number].append(Share(i, cut.start, cut.stop, resident))
