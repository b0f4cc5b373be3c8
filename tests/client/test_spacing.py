"""Ranks that let saves go find steps that all of them can take."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd_client.spacing import SAVES_MAX, Spacing

SETTLED, SAVES = 1200, 2400
"""What they began with is over by then; the steps from then on count."""


@dataclass
class Rank:
    """Whose saves take so many steps to be written, one after the other."""

    slots: int
    write_steps: int
    spacing: Spacing | None = field(default_factory=Spacing)
    busy_until: list[int] = field(default_factory=list)

    def takes(self, step: int) -> bool:
        self.busy_until = [end for end in self.busy_until if end > step]
        idle = self.slots > 1 and not self.busy_until
        if self.spacing is not None and not self.spacing.tries(step, idle=idle):
            return False
        free = len(self.busy_until) < self.slots
        if free:
            self.busy_until.append(max([step, *self.busy_until]) + self.write_steps)
        if self.spacing is not None:
            self.spacing.tried(found_slot=free)
        return free


def common(ranks: list[Rank], steps: list[int]) -> list[int]:
    """The steps that all ranks take, once they have settled."""
    taken = [step for step in steps if all([rank.takes(step) for rank in ranks])]
    return [step for step in taken if step >= steps[SETTLED]]


def evenly(every: int) -> list[int]:
    return list(range(every, every * SAVES, every))


def by_time() -> list[int]:
    """About every hundred steps, and never the same number of them."""
    return list(accumulate((80 + number * 37 % 50 for number in range(SAVES)), initial=100_000))


STEPS = {"each": evenly(1), "each seventh": evenly(7), "each hundredth": evenly(100), "by time": by_time()}


@settings(max_examples=30)
@given(
    slots=st.integers(1, 3),
    writes=st.lists(st.integers(1, 60), min_size=2, max_size=4),
    starts=st.lists(st.integers(0, 100), min_size=8, max_size=8),
    kind=st.sampled_from(sorted(STEPS)),
)
def test_ranks_whose_stores_are_slow_have_steps_in_common(
    slots: int, writes: list[int], starts: list[int], kind: str
) -> None:
    """At most five times as rarely as the slowest could alone, whatever they began with."""
    steps = STEPS[kind]
    every = (steps[-1] - steps[0]) // len(steps)
    ranks = [
        Rank(slots, write * every, busy_until=[steps[0] + start * every] * slots)
        for write, start in zip(writes, starts, strict=False)
    ]
    alone = Rank(slots, max(writes) * every, spacing=None)
    assert len(common(ranks, steps)) >= len(common([alone], steps)) / 5 - 2


def test_without_it_there_are_hardly_any() -> None:
    ranks = [Rank(1, write, spacing=None, busy_until=[start]) for write, start in ((10, 3), (10, 8))]
    assert common(ranks, STEPS["each"]) == []


@given(
    widths=st.lists(st.integers(0, 12), min_size=2, max_size=2, unique=True),
    steps=st.lists(st.integers(0, 1 << 40), min_size=2, unique=True).map(sorted),
)
def test_what_a_rank_tries_is_tried_by_all_that_try_more(widths: list[int], steps: list[int]) -> None:
    """Whatever the steps are."""
    more, less = (Spacing() for _ in widths)
    more.width, less.width = (1 << width for width in sorted(widths))
    tried = [(less.tries(step), more.tries(step)) for step in steps]
    assert (True, False) not in tried


def test_saves_that_come_more_and_more_rarely_are_tried() -> None:
    """Steps 1, 2, 4, 8 …: their number has nothing to do with how many saves there were."""
    spacing = Spacing()
    for step in (1, 2, 3, 4, 6, 7):
        if spacing.tries(step):
            spacing.tried(found_slot=step != 2)
    assert spacing.width > 1
    assert all(spacing.tries(1 << power) for power in range(4, 40))


def test_a_store_that_was_away_for_long_is_soon_given_every_save_again() -> None:
    spacing = Spacing()
    for step in range(1, 100_000):
        if spacing.tries(step):
            spacing.tried(found_slot=False)
    tries = 0
    for step in range(100_000, 100_100):
        if spacing.tries(step):
            spacing.tried(found_slot=True)
            tries += 1
    assert tries >= 90
    assert spacing.width == 1


def test_a_width_has_a_limit() -> None:
    spacing = Spacing()
    for step in range(0, 100_000, 10):
        spacing.tries(step)
        spacing.tried(found_slot=bool(step % 20))
    assert spacing.width == SAVES_MAX * 16, "for saves that are at most 16 steps apart"
    for step in range(100_000, 200_000, 10):
        spacing.tries(step)
        spacing.tried(found_slot=True)
    assert spacing.width == 1
