"""Who meets whom: every two ranks once, in rounds in which nobody waits for another pair."""

from __future__ import annotations

ROUNDS_MAX = 8
"""In a large world each rank meets so many others: enough to tell a bad one from its neighbours."""


def rounds(world: int, rounds_max: int = ROUNDS_MAX) -> list[list[tuple[int, int]]]:
    """Pairs of ranks, the lower first, round by round. In an odd world one rank sits out each round.

    Where there would be more than ``rounds_max`` rounds, that many are taken, evenly spread.
    """
    seats = world + world % 2
    count = seats - 1
    taken = range(count) if count <= rounds_max else [number * count // rounds_max for number in range(rounds_max)]
    return [[pair for pair in _round(seats, number) if pair[1] < world] for number in taken]


def _round(seats: int, number: int) -> list[tuple[int, int]]:
    """The circle method: the last seat stays, the others turn by one place each round."""
    turning = seats - 1
    pairs = [(turning, number)]
    pairs += [((number + step) % turning, (number - step) % turning) for step in range(1, seats // 2)]
    return [(min(pair), max(pair)) for pair in pairs]
