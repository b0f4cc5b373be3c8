"""Shards dealt into lanes: each is read by one rank, and ranks that come and go take the lanes over where they are."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from ckptd.errors import MismatchError
from ckptd_client.data import Reshapes, ResumableStream, Source
from tests.client.data.streaming import Documents, Start, Unsized, flat

LANES = 5


def shards(seed: int, count: int = 12) -> dict[str, list[list[int]]]:
    draw, tokens = random.Random(seed), itertools.count(seed * 10**6)
    return {
        f"{seed}-{shard}": [[next(tokens) for _ in range(1 + draw.randrange(9))] for _ in range(1 + draw.randrange(8))]
        for shard in range(count)
    }


DATA = {"one": shards(1), "two": shards(2)}


def sources() -> dict[str, Source]:
    """Both can only be read in order."""
    return {name: Unsized(Documents(data)) for name, data in DATA.items()}


def lane_of() -> dict[int, int]:
    """Token → the lane of its shard."""
    return {
        token: number % LANES
        for data in DATA.values()
        for number, documents in enumerate(data.values())
        for token in flat(documents)
    }


@pytest.mark.parametrize("plan", range(6))
@pytest.mark.parametrize("length", [None, 11])
def test_each_lane_goes_on_where_it_was(plan: int, length: int | None) -> None:
    draw, lanes = random.Random(plan), lane_of()
    given: dict[tuple[int, int], list[int]] = {}  # lane and source → tokens
    states: list[dict[str, Any]] | None = None
    for _ in range(6):
        options: dict[str, Any] = {"num_workers": 1 + plan, "prefetch_factor": 2} if plan < 2 else {}
        world = draw.randint(1, LANES)
        start = Start(
            sources(),
            world,
            draw.randint(1, 4),
            lanes=LANES,
            exhausted="repeat",
            sequence_length=length,
            accumulation=draw.choice([1, 2]),
            **options,
        )
        if states is not None:
            start.restore(states)
            assert sum(stream.samples for stream in start.streams) == sum(
                order["place"] for state in states for order in state["orders"].values()
            )
        for stream in start.streams:
            batches = iter(stream)
            pending: list[int] = []
            for _ in range(draw.randint(1, 7)):
                pending += flat(next(batches))
                if stream.at_boundary:
                    for token in pending:
                        given.setdefault((lanes[token], token // 10**6), []).append(token)
                    pending = []
        states = start.states
    for (lane, source), tokens in given.items():
        data = DATA["one" if source == 1 else "two"]
        own = [
            token
            for number, documents in enumerate(data.values())
            if number % LANES == lane
            for token in flat(documents)
        ]
        assert tokens == list(itertools.islice(itertools.cycle(own), len(tokens)))
    assert len(given) == 2 * LANES


@pytest.mark.parametrize("workers", [0, 2])
def test_every_record_once_to_the_end(workers: int) -> None:
    records: list[int] = []
    first = Start(sources(), 2, 3, lanes=LANES, exhausted="drop", num_workers=workers)
    for stream in first.streams:
        for batch in itertools.islice(stream, 4):
            records += flat(batch)
    second = Start(sources(), 3, 2, lanes=LANES, exhausted="drop", num_workers=workers)
    second.restore(first.states)
    for stream in second.streams:
        for batch in stream:
            records += flat(batch)
    assert Counter(records) == Counter(lane_of().keys())


def test_a_rank_opens_the_shards_of_its_lanes_alone() -> None:
    data = Documents(DATA["one"])
    stream = ResumableStream({"one": Unsized(data)}, 2, lanes=LANES, rank=1, world=3, exhausted="drop", collate_fn=list)
    assert list(stream)
    numbers = {int(shard.split("-")[1]) % LANES for shard, _ in data.opened}
    assert numbers == {1, 4}


def test_states_that_do_not_make_up_all_lanes_are_refused() -> None:
    start = Start(sources(), 2, 2, lanes=LANES)
    one, other = start.states
    stream = ResumableStream(sources(), 2, lanes=LANES, shuffle=False)
    assert isinstance(stream, Reshapes)
    with pytest.raises(MismatchError, match="lack lanes 1, 3"):
        stream.reshape_state([one], rank=0, world=1)
    with pytest.raises(MismatchError, match="old rank 1 has lanes that another one has"):
        stream.reshape_state([one, one], rank=0, world=1)
    with pytest.raises(MismatchError, match="no states"):
        stream.reshape_state([], rank=0, world=1)
    with pytest.raises(MismatchError, match=r"lacks lanes of rank 0 of 1.*reshape_state"):
        stream.load_state_dict(one)
    stream.load_state_dict(stream.reshape_state([one, other], rank=0, world=1))
    stream.load_state_dict(one | {"orders": one["orders"] | other["orders"]})
    assert stream.changes == 2 * ["world 2 → 1, 0 samples in all of this rank's lanes"]


def test_states_of_one_order_that_differ_are_refused() -> None:
    start = Start(sources(), 2, 2)
    next(iter(start.streams[0]))
    with pytest.raises(MismatchError, match="differ, and they share one order"):
        start.streams[0].reshape_state(start.states, rank=0, world=1)
