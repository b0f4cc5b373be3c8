"""Family (b), data: an interrupted run sees every sample exactly once, in the order of the uninterrupted one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptd.errors import CkptdError, MismatchError, UsageError
from ckptd_client.data import ResumableLoader
from tests.client.roundtrip import restore, save


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def loader(count: int = 23, batch_size: int = 4, **options: Any) -> ResumableLoader:
    return ResumableLoader(Numbers(count), batch_size, **({"seed": 5} | options))


def take(source: ResumableLoader, batches: int | None = None) -> list[int]:
    """Sample ids of so many batches, or of the rest of the epoch."""
    ids: list[int] = []
    for number, batch in enumerate(source, 1):
        ids += batch.tolist()
        if number == batches:
            break
    return ids


def resumed(source: ResumableLoader, **options: Any) -> ResumableLoader:
    """A loader of a new process with the state of this one."""
    fresh = loader(**({"seed": 99} | options))
    restore(save({"loader": source}), {"loader": fresh})
    return fresh


def test_r51_the_position_counts_samples_whatever_the_accumulation() -> None:
    accumulated = 4
    source, ids, optimizer_steps = loader(40, 2), list[int](), 0
    ids += take(source, accumulated * 2)
    optimizer_steps += 2
    state = source.state_dict()
    assert (state["unit"], state["position"]) == ("samples", 2 * accumulated * 2)
    fresh = loader(40, 5, seed=99)  # even the batch size may change
    fresh.load_state_dict(state)
    ids += take(fresh)
    assert sorted(ids) == list(range(40))


def test_r51_a_save_between_micro_batches_keeps_what_was_used() -> None:
    """The gradients of two micro-batches are lost with the process: their samples are given again."""
    source = loader(40, 2, accumulation=4)
    used = take(source, 4)
    take(source, 2)
    stored = save({"loader": source})
    fresh = loader(40, 2, accumulation=4, seed=99)
    restore(stored, {"loader": fresh})
    assert sorted(used + take(fresh)) == list(range(40))


def test_r52_seed_epoch_and_position_are_one_unit() -> None:
    """Two ranks stop after three batches; new processes, made with another seed, go on with the same permutation."""
    whole = [take(loader(48, 4, rank=rank, world=2)) for rank in range(2)]
    assert sorted(whole[0] + whole[1]) == list(range(48))
    for rank in range(2):
        source = loader(48, 4, rank=rank, world=2)
        first = take(source, 3)
        fresh = loader(48, 4, rank=rank, world=2, seed=99)
        fresh.load_state_dict(source.state_dict())
        assert first + take(fresh) == whole[rank]


def test_r52_another_world_goes_on_where_the_first_one_stopped() -> None:
    sources = [loader(48, 4, rank=rank, world=2) for rank in range(2)]
    ids = [sample for source in sources for sample in take(source, 3)]
    states = [source.state_dict() for source in sources]
    assert states[0] == states[1]
    for rank in range(3):
        fresh = loader(48, 4, rank=rank, world=3)
        fresh.load_state_dict(states[0])
        ids += take(fresh)
    assert sorted(ids) == list(range(48))


def test_r53_the_resumed_epoch_has_its_own_order() -> None:
    source = loader()
    epochs = [take(loader_) for loader_ in [source] * 3]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = loader()
    take(again)
    ids = take(again, 2)
    fresh = resumed(again)
    assert fresh.epoch == 1
    assert ids + take(fresh) == epochs[1]
    assert take(fresh) == epochs[2]


def test_r54_the_end_of_an_epoch_is_a_position_like_any_other() -> None:
    source = loader()
    epochs = [take(source) for _ in range(2)]
    at_end = loader()
    iterator = iter(at_end)
    for _ in range(len(at_end)):
        next(iterator)
    assert (at_end.epoch, at_end.position) == (0, 23)
    fresh = resumed(at_end)
    assert take(fresh) == []  # the loop over the epoch ends at once, as it would have
    assert take(fresh) == epochs[1]
    assert next(iterator, None) is None
    assert (at_end.epoch, at_end.position) == (1, 0)
    assert take(resumed(at_end)) == epochs[1]


def test_r55_a_second_resumption_in_one_epoch_does_not_go_back() -> None:
    ids: list[int] = []
    source = loader()
    for _ in range(3):
        ids += take(source, 1)
        source = resumed(source)
    ids += take(source)
    assert sorted(ids) == list(range(23))
    assert ids == take(loader())


def test_r56_a_state_is_not_loaded_into_a_live_iterator() -> None:
    source = loader()
    take(source, 3)
    stored = save({"loader": source})
    fresh = loader(num_workers=1)
    iterator = iter(fresh)
    next(iterator)
    with pytest.raises(CkptdError, match="being iterated"):
        restore(stored, {"loader": fresh})
    assert fresh.position == 4
    next(iterator)
    assert fresh.position == 8
    del iterator
    restore(stored, {"loader": fresh})
    assert fresh.position == 12


def test_r56_an_older_iterator_is_told_that_it_was_replaced() -> None:
    source = loader()
    old = iter(source)
    next(old)
    new = iter(source)
    with pytest.raises(UsageError, match="newer iterator"):
        next(old)
    next(new)
    assert source.position == 8


def test_r57_what_workers_fetched_ahead_does_not_count() -> None:
    source = loader(num_workers=2, prefetch_factor=4)
    ids = take(source, 3)
    assert source.position == 12
    fresh = resumed(source, num_workers=2, prefetch_factor=4)
    ids += take(fresh)
    assert ids == take(loader())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 22}, "samples=22"),
        ({"shuffle": False}, "shuffle=False"),
        ({"unit": "batches"}, "unit='batches'"),
        ({"position": 24}, "position 24 of 23"),
        ({"epoch": -1}, "epoch -1"),
        ({"seed": None}, "no seed"),
    ],
)
def test_r52_a_state_of_other_data_is_refused(change: dict[str, Any], message: str) -> None:
    source = loader()
    with pytest.raises(MismatchError, match=message):
        source.load_state_dict(source.state_dict() | change)
    assert source.position == 0
