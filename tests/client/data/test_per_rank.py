"""Loaders of others: exact in the world that they were saved in, and an error or a stated policy in another one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from ckptd.errors import MismatchError, UsageError
from ckptd_client.data import PerRank, Reshapes
from tests.client.roundtrip import restore, save


class Foreign:
    """A loader that counts records for itself."""

    def __init__(self, record: int = 0) -> None:
        self.record = record

    def state_dict(self) -> dict[str, Any]:
        return {"record": self.record}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.record = state["record"]


def states(world: int = 4) -> list[dict[str, Any]]:
    return [PerRank(Foreign(10 + rank), rank=rank, world=world).state_dict() for rank in range(world)]


def resize(loader: PerRank, rank: int, world: int) -> None:
    assert isinstance(loader, Reshapes)
    loader.load_state_dict(loader.reshape_state(states(), rank=rank, world=world))


def test_the_same_world_goes_on_exactly() -> None:
    for rank in range(4):
        fresh = PerRank(Foreign(), rank=rank, world=4)
        restore(save({"data": PerRank(Foreign(10 + rank), rank=rank, world=4)}), {"data": fresh})
        assert fresh.loader.record == 10 + rank
        assert fresh.changes == []
        resize(fresh, rank, 4)
        assert fresh.loader.record == 10 + rank


def test_another_world_is_an_error_that_says_what_to_do() -> None:
    fresh = PerRank(Foreign(), rank=0, world=3)
    with pytest.raises(MismatchError, match=r"Foreign is on rank 0 of 3 now, and .* states of 4 ranks .*'restart'"):
        resize(fresh, 0, 3)
    with pytest.raises(MismatchError, match=r"data: .*Foreign is on rank 0 of 3 now, and .* state of rank 1 of 4"):
        restore(save({"data": PerRank(Foreign(7), rank=1, world=4)}), {"data": fresh})
    assert fresh.loader.record == 0


def test_restart_leaves_the_loader_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    fresh = PerRank(Foreign(1), rank=2, world=3, on_resize="restart")
    with caplog.at_level(logging.WARNING, "ckptd_client.data"):
        resize(fresh, 2, 3)
    assert fresh.loader.record == 1
    assert fresh.changes == ["world 4 → 3, Foreign starts anew on rank 2"]
    assert [record.message for record in caplog.records] == [f"data: {fresh.changes[0]}"]


@pytest.mark.parametrize("rank", [0, 1])
def test_restart_is_the_policy_for_a_rank_that_both_worlds_have(rank: int) -> None:
    fresh = PerRank(Foreign(1), rank=rank, world=2, on_resize="restart")
    resize(fresh, rank, 2)
    assert (fresh.loader.record, len(fresh.changes)) == (1, 1)


def test_what_all_ranks_saved_alike_is_enough_for_a_policy() -> None:
    common = states()[0] | {"rank": object(), "state": object()}
    fresh = PerRank(Foreign(1), rank=0, world=3, on_resize="restart")
    fresh.load_state_dict(common)
    assert (fresh.loader.record, len(fresh.changes)) == (1, 1)
    with pytest.raises(MismatchError, match="one of 4 ranks"):
        PerRank(Foreign(), rank=0, world=3).load_state_dict(common)


def test_another_rank_of_the_same_world_is_no_resize() -> None:
    with pytest.raises(MismatchError, match="the state of rank 1 of 4"):
        PerRank(Foreign(), rank=0, world=4, on_resize="restart").load_state_dict(states()[1])


def test_a_function_makes_the_new_states() -> None:
    def furthest(old: Sequence[Any], rank: int, world: int) -> dict[str, Any]:
        return {"record": max(state["record"] for state in old) * world + rank}

    fresh = PerRank(Foreign(), rank=1, world=3, on_resize=furthest)
    resize(fresh, 1, 3)
    assert fresh.loader.record == 13 * 3 + 1
    assert fresh.changes == ["world 4 → 3, Foreign goes on with a state made for rank 1"]


@pytest.mark.parametrize("state", [{}, "each rank had its own", {"rank": 0, "world": None}])
def test_what_it_did_not_save_is_refused(state: Any) -> None:
    with pytest.raises(MismatchError, match="no state that it saved"):
        PerRank(Foreign(), on_resize="restart").load_state_dict(state)


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([], {}, "list has no state_dict"),
        (Foreign(), {"rank": 2, "world": 2}, "rank 2 of 2"),
        (Foreign(), {"on_resize": "wait"}, "on_resize='wait'"),
    ],
)
def test_what_cannot_be_is_refused(loader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PerRank(loader, **options)
