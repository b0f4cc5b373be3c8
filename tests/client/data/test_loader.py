"""The loader in real use: worker processes, interruptions in the middle and at the end, steps of several batches."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch

from ckptd.errors import MismatchError, UsageError
from ckptd_client.data import ResumableLoader
from tests.client.roundtrip import restore, save

SAMPLES = 61


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample is its id and a number that is drawn when it is made."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.randrange(2**40)])


class Start:
    """One start of a run: all its ranks, one after the other in this process."""

    def __init__(self, world: int, batch_size: int, **options: Any) -> None:
        self.loaders = [
            ResumableLoader(Noisy(), batch_size, seed=7, rank=rank, world=world, **options) for rank in range(world)
        ]

    def restore(self, states: list[dict[str, Any]]) -> None:
        assert all(state == states[0] for state in states)
        for loader in self.loaders:
            loader.load_state_dict(states[0])

    def train(self, steps: int) -> list[tuple[int, int]]:
        """Go on for so many steps, over ends of epochs; what all ranks were given, in order."""
        given: list[tuple[int, int]] = []
        while steps:
            iterators = [iter(loader) for loader in self.loaders]
            for batches in zip(*iterators, strict=True):
                given += [(sample, noise) for batch in batches for sample, noise in batch.tolist()]
                if not (steps := steps - 1):
                    break
        return given

    @property
    def states(self) -> list[dict[str, Any]]:
        return [loader.state_dict() for loader in self.loaders]


WORKERS: list[dict[str, Any]] = [
    {"num_workers": 1, "prefetch_factor": 4},
    {"num_workers": 2, "prefetch_factor": 1, "persistent_workers": True},
    {"num_workers": 1, "persistent_workers": True},
    {"num_workers": 2, "prefetch_factor": 3},
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("plan", range(3))
def test_each_sample_once_with_workers(plan: int) -> None:
    """Random starts: ids, and what workers draw for each, are those of a single process that was never interrupted."""
    whole = Start(1, 5, num_workers=1).train(3 * SAMPLES // 5)
    draw = random.Random(plan)
    given: list[tuple[int, int]] = []
    states: list[dict[str, Any]] | None = None
    while len(given) < 2 * SAMPLES:
        start = Start(draw.choice([1, 2, 3]), draw.choice([1, 3, 5]), **draw.choice(WORKERS))
        if states is not None:
            start.restore(states)
        for _ in range(2):  # again with the same workers, which have fetched ahead
            given += start.train(draw.randint(1, 8))
        states = start.states
    assert given[: 2 * SAMPLES] == whole[: 2 * SAMPLES]
    ids = [sample for sample, _ in given]
    assert sorted(ids[:SAMPLES]) == sorted(ids[SAMPLES : 2 * SAMPLES]) == list(range(SAMPLES))


def test_a_state_within_accumulation_goes_back_to_the_boundary() -> None:
    """Samples that made it into an optimizer step, over interruptions at any batch: each once."""
    used: list[int] = []
    state: dict[str, Any] | None = None
    for seed in range(40):
        draw = random.Random(seed)
        loader = ResumableLoader(Noisy(), draw.choice([2, 3]), seed=7, accumulation=draw.choice([1, 2, 4]))
        if state is not None:
            loader.load_state_dict(state)
        gradients: list[int] = []
        iterator = iter(loader)
        for _ in range(draw.randint(1, 6)):
            if (batch := next(iterator, None)) is None:
                assert not gradients, "the last batch of an epoch ends a step"
                iterator = iter(loader)
                continue
            gradients += batch[:, 0].tolist()
            if loader.at_boundary:
                used += gradients
                gradients = []
        state = loader.state_dict()
    assert len(used) > 3 * SAMPLES
    for epoch in range(len(used) // SAMPLES):
        assert sorted(used[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))


def test_within_a_step_the_loop_goes_on_from_what_was_given() -> None:
    loader = ResumableLoader(Noisy(), 4, shuffle=False, accumulation=4)
    first = next(iter(loader))
    assert not loader.at_boundary
    assert (loader.position, loader.state_dict()["position"]) == (4, 0)
    assert [*first[:, 0].tolist(), *next(iter(loader))[:, 0].tolist()] == list(range(8))


def test_changes_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    old = Start(4, 4)
    old.train(2)
    stored = save({"loader": old.loaders[0]})
    new = ResumableLoader(Noisy(), 8, seed=7, accumulation=2, rank=1, world=3)
    with caplog.at_level(logging.INFO, "ckptd_client.data"):
        restore(stored, {"loader": new})
    line = "world 4 → 3, batch 4 → 8, accumulation 1 → 2, position 32 of epoch 0 in all"
    assert new.changes == [line]
    assert [record.message for record in caplog.records] == [f"data: {line}"]


def test_nothing_changed_is_no_change() -> None:
    loader = ResumableLoader(Noisy(), 4)
    loader.load_state_dict(loader.state_dict())
    assert loader.changes == []
    loader.load_state_dict(loader.state_dict() | {"seed": 9})
    assert loader.changes == ["seed 9 as saved, not 0, position 0 of epoch 0 in all"]


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(MismatchError, match="no dict"):
        ResumableLoader(Noisy(), 4).load_state_dict("each rank had its own")  # type: ignore[arg-type]


def test_a_step_of_no_batches_is_refused() -> None:
    with pytest.raises(UsageError, match="accumulation=0"):
        ResumableLoader(Noisy(), 4, accumulation=0)
