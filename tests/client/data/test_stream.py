"""One order over named sources, shards, passes: each record and each token once, whatever changes between starts."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.errors import MismatchError, UsageError
from ckptd_client.data import LineFiles, ResumableStream, Sequences, Source, TokenFiles
from ckptd_client.data.position import SourcePosition
from tests.client.data.streaming import Documents, Start, Unsized, flat
from tests.client.roundtrip import restore, save

WEB = {f"web-{shard}": [f"w{shard}.{record}" for record in range(shard * 5)] for shard in range(4)}  # one is empty
CODE = {"code-a": [f"c{record}" for record in range(11)], "code-b": [f"c{record}" for record in range(11, 13)]}


def documents(seed: int, shards: int) -> dict[str, list[list[int]]]:
    """Documents of 0 to 9 tokens, each token other than all others."""
    draw, tokens = random.Random(seed), itertools.count(seed * 10**6)
    return {
        f"{seed}-{shard}": [[next(tokens) for _ in range(draw.randrange(10))] for _ in range(draw.randrange(1, 9))]
        for shard in range(shards)
    }


def in_order(shards: dict[str, list[Any]]) -> list[Any]:
    return [record for records in shards.values() for record in records]


plans = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=6)


def over_starts(sources: dict[str, Source], plan: list[tuple[int, int, int]], **options: Any) -> list[Any]:
    """What is given over the starts of a plan: world, batch size and steps of each. States are equal on all ranks."""
    samples: list[Any] = []
    states: list[dict[str, Any]] | None = None
    for world, batch_size, steps in plan:
        start = Start(sources, world, batch_size, **options)
        if states is not None:
            start.restore(states)
        samples += start.train(steps)
        states = start.states
        assert all(state == states[0] for state in states)
    return samples


@settings(max_examples=100, deadline=None)
@given(plan=plans, exhausted=st.sampled_from(["stop", "repeat", "drop"]))
def test_records_of_each_source_come_once_and_in_order(plan: list[tuple[int, int, int]], exhausted: str) -> None:
    sources: dict[str, Source] = {"web": Sequences(WEB), "code": Sequences(CODE)}
    samples = over_starts(sources, plan, exhausted=exhausted, weights={"web": 2, "code": 1})
    for prefix, shards in (("w", WEB), ("c", CODE)):
        records = [sample for sample in samples if sample.startswith(prefix)]
        assert records == list(itertools.islice(itertools.cycle(in_order(shards)), len(records)))
    if exhausted != "drop":
        whole = Start(sources, 1, 1, exhausted=exhausted, weights={"web": 2, "code": 1})
        assert samples == whole.train(len(samples))


@settings(max_examples=100, deadline=None)
@given(
    plan=plans, length=st.integers(1, 23), sized=st.booleans(), exhausted=st.sampled_from(["stop", "repeat", "drop"])
)
def test_tokens_of_each_source_come_once_and_in_order(
    plan: list[tuple[int, int, int]], length: int, sized: bool, exhausted: str
) -> None:
    shards = {"one": documents(1, 4), "two": documents(2, 3)}
    sources: dict[str, Source] = {"one": Documents(shards["one"]), "two": Documents(shards["two"])}
    if not sized:
        sources = {"one": Unsized(Documents(shards["one"])), "two": Unsized(Documents(shards["two"]))}
    samples = over_starts(sources, plan, exhausted=exhausted, weights={"one": 1, "two": 3}, sequence_length=length)
    assert all(len(sample) == length for sample in samples)
    for seed, name in ((1, "one"), (2, "two")):
        tokens = [token for token in flat(samples) if token // 10**6 == seed]
        assert tokens == list(itertools.islice(itertools.cycle(flat(in_order(shards[name]))), len(tokens)))


@pytest.mark.parametrize("exhausted", ["stop", "repeat", "drop"])
def test_a_source_that_counts_and_one_that_does_not_give_the_same(exhausted: str) -> None:
    def sources(wrap: Any) -> dict[str, Source]:
        return {str(seed): wrap(Documents(documents(seed, 5))) for seed in range(3)}

    plan = [(3, 2, 5), (1, 4, 7), (4, 1, 6), (2, 3, 9)]
    for length in (None, 6):
        options: dict[str, Any] = {"exhausted": exhausted, "sequence_length": length, "shuffle": True}
        known, unknown = (over_starts(sources(wrap), plan, **options) for wrap in (lambda source: source, Unsized))
        assert len(known) > 40
        assert [list(sample) for sample in known] == [list(sample) for sample in unknown]


def test_a_rank_reads_only_its_own_where_counts_are_known() -> None:
    source = Documents({"big": [[record] * 10 for record in range(1000)]})
    start = Start({"big": source}, 10, 2)
    given = start.train(25)
    assert len(given) == 500
    seen: list[tuple[str, int]] = []
    source.opened = seen
    stream = ResumableStream({"big": source}, 2, rank=9, world=10, shuffle=False, collate_fn=list)
    for batch in stream:
        assert all(record[0] % 20 in (18, 19) for record in batch)
    assert len(seen) == 50
    assert [offset for _, offset in seen] == list(range(18, 1000, 20))


def test_each_pass_has_its_own_order_of_shards() -> None:
    stream = ResumableStream({"web": Sequences(WEB)}, 3, seed=4, collate_fn=list)
    passes = [[record for batch in stream for record in batch] for _ in range(4)]
    assert len({tuple(records) for records in passes}) > 1
    for records in passes:
        assert Counter(records) == Counter(in_order(WEB))


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1, "persistent_workers": True},
        {"num_workers": 2, "prefetch_factor": 3},
        {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True},
    ],
)
@pytest.mark.parametrize("length", [None, 7])
def test_each_sample_once_with_workers(options: dict[str, Any], length: int | None) -> None:
    sources: dict[str, Source] = {"one": Documents(documents(1, 4)), "two": Unsized(Documents(documents(2, 4)))}
    common: dict[str, Any] = {"sequence_length": length, "exhausted": "stop", "shuffle": True, "seed": 8}
    whole = [list(sample) for sample in Start(sources, 1, 1, **common).train(60)]
    first = Start(sources, 2, 2, **common, **options)
    samples = [*first.train(2), *first.train(1)]
    second = Start(sources, 1, 3, **common)
    second.restore(first.states)
    samples += second.train(3)
    third = Start(sources, 2, 1, **(common | {"seed": 1}), **options)
    third.train(1)  # workers that live on do so with the seed of the state
    third.restore(second.states)
    samples += third.train(9)
    assert len(samples) > 30
    assert [list(sample) for sample in samples] == whole[: len(samples)]


def test_what_a_transform_draws_in_workers_depends_on_the_sample_alone() -> None:
    def noisy(record: str) -> tuple[str, float]:
        return record, random.random()

    def start(world: int, workers: int) -> Start:
        return Start({"web": Sequences(WEB)}, world, 2, transform=noisy, num_workers=workers)

    assert start(1, 1).train(9) == (start(3, 2).train(3))


# Ends


def test_stop_ends_where_a_source_has_nothing_left() -> None:
    start = Start({"web": Sequences(WEB), "code": Sequences(CODE)}, 1, 4)
    given = start.train(100, iterations=1)
    assert sorted(record for record in given if record[0] == "c") == sorted(in_order(CODE))
    assert len(given) < 30


def test_drop_ends_with_the_last_source() -> None:
    start = Start({"web": Sequences(WEB), "code": Sequences(CODE)}, 1, 4, exhausted="drop")
    for _ in range(2):
        assert sorted(start.train(100, iterations=1)) == sorted([*in_order(CODE), *in_order(WEB)])


def test_repeat_does_not_end_and_counts_passes() -> None:
    start = Start({"web": Sequences(WEB), "code": Sequences(CODE)}, 2, 4, exhausted="repeat")
    given = start.train(50, iterations=1)
    assert len(given) == 400
    assert start.streams[0].positions[0]["code"].passes == 200 // 13
    after = Start({"web": Sequences(WEB), "code": Sequences(CODE)}, 2, 4, exhausted="stop")
    after.restore(start.states)
    assert "exhausted repeat → stop" in after.streams[0].changes[0]
    more = [after.train(100, iterations=1) for _ in range(3)]
    assert all(more), "each iteration is another pass, however many there were before"


def test_what_is_less_than_a_sample_for_each_rank_comes_first_after_the_end() -> None:
    start = Start({"code": Sequences(CODE)}, 3, 2)
    first = start.train(100, iterations=1)
    assert first == in_order(CODE)[:12]
    assert start.train(100, iterations=1) == ["c12", *in_order(CODE)[:11]]


def test_a_step_may_be_larger_than_a_pass() -> None:
    start = Start({"code": Sequences(CODE)}, 1, 20)
    assert [start.train(9, iterations=1) for _ in range(3)] == [in_order(CODE)] * 3


def test_a_source_that_joins_late_owes_no_passes() -> None:
    old = Start({"code": Sequences(CODE)}, 1, 4)
    old.train(100, iterations=3)
    new = Start({"code": Sequences(CODE), "web": Sequences(WEB)}, 1, 4, exhausted="drop")
    new.restore(old.states)
    assert sorted(new.train(100, iterations=1)) == sorted([*in_order(CODE), *in_order(WEB)])


def test_the_end_is_a_position_like_any_other() -> None:
    start = Start({"code": Sequences(CODE)}, 1, 4)
    assert len(start.train(4)) == 13
    fresh = Start({"code": Sequences(CODE)}, 1, 4)
    fresh.restore(start.states)
    assert list(fresh.streams[0]) == []
    assert fresh.train(4) == in_order(CODE)


def test_accumulation_goes_back_to_the_boundary_and_ends_with_the_stream() -> None:
    stream = ResumableStream({"code": Sequences(CODE)}, 2, shuffle=False, accumulation=3, collate_fn=list)
    boundaries, places = list[bool](), list[int]()
    for _ in stream:
        boundaries.append(stream.at_boundary)
        places.append(stream.state_dict()["orders"]["0"]["place"])
    assert boundaries == [False, False, True, False, False, True, True]
    assert places == [0, 0, 6, 6, 6, 12, 13]


@pytest.mark.parametrize("length", [None, 5])
def test_a_source_without_records_is_an_error(length: int | None) -> None:
    nothing = Unsized(Documents({"a": [], "b": []}))
    stream = ResumableStream({"nothing": nothing}, 1, exhausted="repeat", sequence_length=length)
    with pytest.raises(UsageError, match="source nothing has no record in a whole pass"):
        next(iter(stream))


# Restores


def test_changes_are_logged_with_the_position_of_each_source(caplog: pytest.LogCaptureFixture) -> None:
    sources: dict[str, Source] = {"one": Documents(documents(1, 4)), "two": Documents(documents(2, 4))}
    old = Start(sources, 2, 2, sequence_length=4, exhausted="repeat")
    old.train(10)
    new = ResumableStream(
        sources | {"three": Documents(documents(3, 1))},
        3,
        weights={"one": 1, "two": 0.5, "three": 1},
        exhausted="repeat",
        sequence_length=8,
        shuffle=False,
    )
    with caplog.at_level(logging.INFO, "ckptd_client.data"):
        restore(save({"data": old.streams[0]}), {"data": new})
    at = new.positions[0]
    line = (
        "world 2 → 1, batch 2 → 3, sequence length 4 → 8, weight of two 1.0 → 0.5, source three is new, "
        f"one in pass {at['one'].passes} after {at['one'].records} records, "
        "three in pass 0 after 0 records, "
        f"two in pass {at['two'].passes} after {at['two'].records} records, 40 samples and 160 tokens in all"
    )
    assert new.changes == [line]
    assert [record.message for record in caplog.records] == [f"data: {line}"]


def test_new_weights_and_lengths_lose_no_token() -> None:
    shards = {"one": documents(1, 4), "two": documents(2, 4)}
    sources: dict[str, Source] = {name: Documents(shards[name]) for name in shards}
    samples: list[Any] = []
    states = None
    for number in range(8):
        weights = {"one": 1 + number % 3, "two": number % 2}
        start = Start(sources, 1 + number % 3, 2, weights=weights, sequence_length=3 + number, exhausted="repeat")
        if states is not None:
            start.restore(states)
        samples += start.train(3)
        states = start.states
    for seed, name in ((1, "one"), (2, "two")):
        tokens = [token for token in flat(samples) if token // 10**6 == seed]
        assert len(tokens) > 30
        assert tokens == list(itertools.islice(itertools.cycle(flat(in_order(shards[name]))), len(tokens)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": {"web": Sequences({"web-9": ["x"]})}}, "source web has other shards"),
        ({"sources": {"books": Sequences(WEB)}}, "source web is in the checkpoint and not here"),
        ({"sequence_length": 8}, "sequence_length=None, and here it is 8"),
        ({"lanes": 2}, "lanes=0, and here it is 2.*fixed for the life of a run"),
        ({"shuffle": False}, "shuffle=True"),
    ],
)
def test_a_state_of_other_data_is_refused(options: dict[str, Any], message: str) -> None:
    state = ResumableStream({"web": Sequences(WEB)}, 2).state_dict()
    stream = ResumableStream(**({"sources": {"web": Sequences(WEB)}, "batch_size": 2} | options))
    with pytest.raises(MismatchError, match=message):
        stream.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"orders": {}}, "lacks lanes of rank 0 of 1"),
        ({"orders": {"0": {"epoch": -1, "place": 0, "sources": {}}}}, "no position that can be read"),
        (
            {"orders": {"0": {"epoch": 0, "place": 0, "sources": {"web": {"passes": 0}}}}},
            "no position that can be read",
        ),
        ({"orders": None}, "has no orders"),
        ({"seed": None}, "no seed"),
        ({"unit": "batches"}, "unit='batches'"),
    ],
)
def test_a_state_that_is_none_is_refused(change: dict[str, Any], message: str) -> None:
    stream = ResumableStream({"web": Sequences(WEB)}, 2)
    with pytest.raises(MismatchError, match=message):
        stream.load_state_dict(stream.state_dict() | change)
    assert stream.samples == 0


def test_a_document_that_has_become_shorter_is_refused() -> None:
    stream = ResumableStream({"one": Documents({"a": [list(range(10))]})}, 1, sequence_length=6)
    next(iter(stream))
    other = ResumableStream({"one": Unsized(Documents({"a": [[1, 2, 3]]}))}, 1, sequence_length=6)
    other.load_state_dict(stream.state_dict())
    with pytest.raises(MismatchError, match="record 0 of a in source one has 3 tokens, and 6 of it were given"):
        next(iter(other))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": {}}, "at least one source"),
        ({"weights": {"web": 1, "books": 1}}, "weights are for"),
        ({"weights": {"web": 0}}, "one positive"),
        ({"weights": {"web": float("nan")}}, "finite"),
        ({"exhausted": "wait"}, "none of stop, repeat and drop"),
        ({"batch_size": 0}, "batches of 0"),
        ({"rank": 2, "world": 2}, "rank 2 of 2"),
        ({"lanes": 2, "world": 3}, "2 lanes for 3 ranks"),
        ({"lanes": 5}, "4 shards for 5 lanes"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ResumableStream(**({"sources": {"web": Sequences(WEB)}, "batch_size": 2} | options))


def test_a_state_is_not_loaded_into_a_live_iterator() -> None:
    stream = ResumableStream({"web": Sequences(WEB)}, 2)
    iterator = iter(stream)
    next(iterator)
    with pytest.raises(UsageError, match="being iterated"):
        stream.load_state_dict(stream.state_dict())


# Sources of files


def test_token_files(tmp_path: Path) -> None:
    tokens = np.arange(200_000, dtype=np.uint32)
    tokens[:70_000].tofile(tmp_path / "a.bin")
    tokens[70_000:].tofile(tmp_path / "b.bin")
    sources: dict[str, Source] = {"text": TokenFiles(tmp_path, dtype="uint32")}
    options: dict[str, Any] = {"sequence_length": 1000, "collate_fn": torch.utils.data.default_collate}
    old = Start(sources, 3, 2, **options)
    first = old.train(20)
    assert old.streams[0].positions == {
        0: {"text": SourcePosition(shard=1, record=0, offset=50_000, records=2, tokens=120_000)}
    }
    new = Start(sources, 2, 5, **options, num_workers=1)
    new.restore(old.states)
    assert flat(first + new.train(8)) == tokens.tolist()
    assert new.streams[0].tokens == 200_000


def test_line_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"id": {number}}}\n' for number in range(10)))
    (tmp_path / "b.jsonl").write_text("ü\u2028still the line\nlast without an end")
    stream = ResumableStream({"text": LineFiles(tmp_path)}, 5, shuffle=False)
    lines = [line for batch in stream for line in batch]
    assert lines == [*(f'{{"id": {number}}}' for number in range(10)), "ü\u2028still the line", "last without an end"]


def test_folders_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no file \*.bin"):
        TokenFiles(tmp_path)
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(UsageError, match="whole tokens of uint16"):
        TokenFiles(tmp_path)
