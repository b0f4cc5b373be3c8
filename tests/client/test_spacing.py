"""Ranks that let saves go find steps that all of them can take."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd_client.spacing import STRIDE_MAX, Spacing

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
        if self.spacing is not None and not self.spacing.tries(step):
            return False
        free = len(self.busy_until) < self.slots
        if free:
            self.busy_until.append(max([step, *self.busy_until]) + self.write_steps)
        if self.spacing is not None:
            self.spacing.tried(found_slot=free)
        return free


def common(ranks: list[Rank], every: int = 1) -> list[int]:
    """The steps that all ranks take."""
    steps = [step for step in range(every, every * SAVES, every) if all([rank.takes(step) for rank in ranks])]
    return [step for step in steps if step >= SETTLED * every]


@settings(max_examples=30)
@given(
    slots=st.integers(1, 3),
    writes=st.lists(st.integers(1, 60), min_size=2, max_size=4),
    starts=st.lists(st.integers(0, 100), min_size=8, max_size=8),
    every=st.sampled_from([1, 7, 100]),
)
def test_ranks_whose_stores_are_slow_have_steps_in_common(
    slots: int, writes: list[int], starts: list[int], every: int
) -> None:
    """At most four times as rarely as the slowest could alone, whatever they began with."""
    ranks = [
        Rank(slots, write * every, busy_until=[start * every] * slots)
        for write, start in zip(writes, starts, strict=False)
    ]
    alone = Rank(slots, max(writes) * every, spacing=None)
    assert len(common(ranks, every)) >= len(common([alone], every)) / 4 - 2


def test_without_it_there_are_hardly_any() -> None:
    ranks = [Rank(1, write, spacing=None, busy_until=[start]) for write, start in ((10, 3), (10, 8))]
    assert common(ranks) == []


def test_a_store_that_keeps_up_again_is_given_every_save() -> None:
    spacing = Spacing()
    for step in range(10_000):
        if spacing.tries(step):
            spacing.tried(found_slot=False)
    assert spacing.stride > 1000
    for step in range(10_000, 1_000_000):
        if spacing.tries(step):
            spacing.tried(found_slot=True)
    assert spacing.stride == 1
    assert all(spacing.tries(step) for step in range(1_000_000, 1_000_010))


def test_a_stride_has_a_limit() -> None:
    spacing = Spacing()
    for _ in range(100):
        spacing.tried(found_slot=False)
    assert spacing.stride == STRIDE_MAX
