"""Whatever changes between starts, all ranks together are given the one order, each sample once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import UsageError
from ckptd_client.data.sampler import Cursor, Item, ResumableSampler


@dataclass(frozen=True)
class Start:
    """One start of a run, which takes so many steps before it is interrupted."""

    world: int
    batch_size: int
    steps: int


starts = st.lists(
    st.builds(Start, world=st.integers(1, 6), batch_size=st.integers(1, 5), steps=st.integers(0, 12)),
    min_size=1,
    max_size=12,
)


def ranks(samples: int, start: Start, cursor: Cursor, *, drop_last: bool = False) -> list[ResumableSampler]:
    samplers = [
        ResumableSampler(
            samples, start.batch_size, seed=3, shuffle=True, drop_last=drop_last, rank=rank, world=start.world
        )
        for rank in range(start.world)
    ]
    for sampler in samplers:
        sampler.cursor = cursor
    return samplers


def train(samples: int, start: Start, cursor: Cursor, *, drop_last: bool = False) -> tuple[list[list[Item]], Cursor]:
    """What all ranks are given in each step, over as many epochs as it takes, and where they are then."""
    given: list[list[Item]] = []
    for _ in range((start.steps + 1) * start.world):
        samplers = ranks(samples, start, cursor, drop_last=drop_last)
        for batches in zip(*samplers, strict=True):
            if len(given) == start.steps:
                return given, cursor
            assert all(batches), "every rank has a sample in every step"
            assert all(len(batch) <= start.batch_size for batch in batches)
            given.append([item for batch in batches for item in batch])
            cursor = samplers[0].after(cursor)
        if len(given) == start.steps:
            return given, cursor
        cursor = samplers[0].next_epoch(cursor)
    raise AssertionError("epoch after epoch gives nothing")


def order(samples: int, epochs: int) -> list[Item]:
    """The epochs' orders, one after the other, as one rank with batches of one is given them."""
    given, _ = train(samples, Start(1, 1, samples * epochs), Cursor())
    return [item for step in given for item in step]


@settings(max_examples=400, deadline=None)
@given(samples=st.integers(1, 40), plan=starts)
def test_each_sample_once_in_one_order(samples: int, plan: list[Start]) -> None:
    cursor, given = Cursor(), list[Item]()
    for start in plan:
        steps, cursor = train(samples, start, cursor)
        given += [item for step in steps for item in step]
    assert given == order(samples, len(given) // samples + 1)[: len(given)]
    indices = [index for index, _ in given]
    for epoch in range(len(given) // samples):
        assert sorted(indices[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(30, 60), plan=starts)
def test_drop_last_leaves_out_less_than_a_step_of_the_world_that_ends_the_epoch(
    samples: int, plan: list[Start]
) -> None:
    cursor = Cursor()
    given: dict[int, list[Item]] = {}
    for start in plan:
        for _ in range(start.steps):
            before = cursor
            steps, cursor = train(samples, Start(start.world, start.batch_size, 1), cursor, drop_last=True)
            epoch = cursor.epoch
            if epoch != before.epoch:
                left_out = samples - before.position
                assert left_out < start.world * start.batch_size
                assert given.get(before.epoch, []) == order(samples, epoch)[-samples:][: -left_out or None]
            given.setdefault(epoch, []).extend(steps[0])
            assert len(steps[0]) == start.world * start.batch_size


@pytest.mark.parametrize(
    ("samples", "batch_size", "world", "steps"),
    [
        (24, 4, 2, [8, 8, 8]),
        (23, 4, 2, [8, 8, 7]),
        (25, 4, 2, [8, 8, 7, 2]),  # not 8, 8, 8 and one sample for two ranks
        (7, 1, 3, [3, 3]),  # and one carried over
        (2, 4, 3, []),
    ],
)
def test_the_last_steps_of_an_epoch(samples: int, batch_size: int, world: int, steps: list[int]) -> None:
    samplers = ranks(samples, Start(world, batch_size, 0), Cursor())
    taken = [sum(len(batch) for batch in batches) for batches in zip(*samplers, strict=True)]
    assert taken == steps
    assert {len(sampler) for sampler in samplers} == {len(steps)}


def test_what_is_carried_over_keeps_its_seeds() -> None:
    (first,) = ranks(7, Start(1, 7, 1), Cursor())
    ((*_, last),) = list(first)
    carried = ranks(7, Start(3, 1, 1), Cursor(1, -1))
    assert next(iter(carried[0])) == [last]


def test_a_step_of_which_nothing_would_remain_is_refused() -> None:
    with pytest.raises(UsageError, match="drop_last leaves nothing of 7 samples: a step of 2 ranks takes 8"):
        ResumableSampler(7, 4, seed=0, shuffle=True, drop_last=True, rank=0, world=2)
