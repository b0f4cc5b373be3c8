"""How ranks agree: one question at a time, an error that all hear, and never an answer of an earlier start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptd.errors import CkptdError, ConfigError, DeadlineExceeded, StateError, UsageError
from ckptd_client.agreement import Agreement
from ckptd_client.meeting import StorageStore, TorchStore
from ckptd_client.roll_call import roll_call
from ckptd_client.roots import Root
from ckptd_client.topology import Topology, torch_store

World = list[Agreement]


def start(folder: Path, world: int = 2, launch: str = "a", deadline_seconds: float = 20) -> World:
    """The ranks of one start, which agree through a folder."""
    root = Root(f"file://{folder}", {}, launch)
    return [
        Agreement(StorageStore(root, 1, world), rank, world, deadline_seconds=deadline_seconds) for rank in range(world)
    ]


def outcomes(world: World, ask: Callable[[Agreement], object]) -> list[object]:
    """What each rank gets, or raises, when all ask at once."""

    def one(rank: Agreement) -> object:
        try:
            return ask(rank)
        except CkptdError as error:
            return error

    with ThreadPoolExecutor(len(world)) as pool:
        return list(pool.map(one, world))


def errors(world: World, ask: Callable[[Agreement], object], kind: type[CkptdError]) -> list[str]:
    found = outcomes(world, ask)
    assert [type(error) for error in found] == [kind] * len(world)
    return [str(error) for error in found]


def test_all_hear_what_rank_0_makes_of_it(tmp_path: Path) -> None:
    world = start(tmp_path, 3)
    assert outcomes(world, lambda rank: rank.decide("sum", rank.rank + 1, sum)) == [6, 6, 6]
    assert outcomes(world, lambda rank: rank.decide("sum", lambda: rank.rank, sum)) == [3, 3, 3]


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_has_no_answer_ends_the_question_for_all(tmp_path: Path, culprit: int) -> None:
    def mine(rank: Agreement) -> int:
        if rank.rank == culprit:
            raise StateError("nothing to say")
        return 1

    world = start(tmp_path, 3)
    assert all(
        "nothing to say" in text
        for text in errors(world, lambda rank: rank.decide("sum", lambda: mine(rank), sum), StateError)
    )
    assert outcomes(world, lambda rank: rank.decide("again", 1, sum)) == [3, 3, 3]


def test_ranks_that_put_different_questions_are_told_at_once(tmp_path: Path) -> None:
    world = start(tmp_path)
    for text in errors(world, lambda rank: rank.decide(f"question {rank.rank}", 1, sum), UsageError):
        assert "rank 0 is at 'question 0', and rank 1 at 'question 1'" in text


def test_a_rank_that_does_not_answer_is_named(tmp_path: Path) -> None:
    # Long enough that rank 0's answer reaches the others before they give up on it, on a slow disk too.
    world = start(tmp_path, 3, deadline_seconds=5)
    for text in errors(world[::2], lambda rank: rank.decide("sum", 1, sum), DeadlineExceeded):
        assert "ranks [1] did not answer 'sum'" in text


# An earlier start


@pytest.mark.parametrize("world", [2, 4])
def test_no_answer_of_an_earlier_start_is_taken(tmp_path: Path, world: int) -> None:
    """Its launch id was the same. Where there are more ranks now, the new ones find nothing in their own places."""

    def ask(answer: str) -> Callable[[Agreement], Any]:
        return lambda rank: rank.decide("step", None, lambda _: answer)

    assert outcomes(start(tmp_path), ask("old")) == ["old", "old"]
    found = outcomes(start(tmp_path, world), ask("new"))
    if world == 2:
        assert [type(error) for error in found] == [ConfigError, ConfigError]
        assert all("an earlier start was also called 'a'" in str(error) for error in found)
    else:
        assert found == ["new"] * world
    assert outcomes(start(tmp_path, launch="b"), ask("new")) == ["new", "new"]


def test_what_was_left_in_torchruns_store_before_a_restart_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is the agent's, and outlives the ranks; the launch has the same name without a rendezvous id."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
    }.items():
        monkeypatch.setenv(name, value)
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        store = TorchStore(torch_store(), "ckptd//")
        assert store.peek("0001.json") is None
        store.put("0001.json", b"x")
        assert TorchStore(torch_store(), "ckptd//").get("0001.json", 20) == b"x"


def test_every_srun_of_a_slurm_job_is_a_start_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    launches: list[str] = []
    for restart, step in (("0", "0"), ("0", "1"), ("1", "0")):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        monkeypatch.setenv("SLURM_STEP_ID", step)
        found = Topology.detect()
        assert (found.rank, found.world) == (1, 2)
        launches.append(found.launch)
    assert len(set(launches)) == 3
    assert {launch.rpartition("#")[0] for launch in launches} == {"slurm-7"}


# Who is there


class KeptStore:
    """A store that outlives the ranks; gives each of them a connection of its own."""

    def __init__(self) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __call__(self) -> TorchStore:
        return TorchStore(dist.TCPStore("127.0.0.1", self.server.port, is_master=False), "a/")


@pytest.fixture
def kept_store() -> Iterator[KeptStore]:
    found = KeptStore()
    yield found
    del found.server


def called(store: KeptStore, world: int, order: Sequence[int], pause_seconds: float = 0.0) -> set[str]:
    """The names that the ranks of one start get, which come in this order."""
    with ThreadPoolExecutor(world) as pool:
        calls = []
        for rank in order:
            calls.append(pool.submit(roll_call, store(), rank, world, 20))
            time.sleep(pause_seconds)
        return {call.result(60) for call in calls}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_what_an_earlier_start_left_in_the_store_is_not_taken_for_this_ones(
    kept_store: KeptStore, order: Sequence[int]
) -> None:
    """Of the same name, with as many ranks, or with more or fewer."""
    starts = [called(kept_store, 3, order), called(kept_store, 3, order, 0.7), called(kept_store, 2, (0, 1))]
    starts.append(called(kept_store, 3, order))
    assert [len(names) for names in starts] == [1] * 4
    assert len(set.union(*starts)) == 4


def test_a_rank_that_does_not_come_is_named_though_one_like_it_was_there(kept_store: KeptStore) -> None:
    called(kept_store, 2, (0, 1))
    with pytest.raises(DeadlineExceeded, match=r"ranks \[1\] did not come"):
        roll_call(kept_store(), 0, 2, 0.8)
    with pytest.raises(DeadlineExceeded, match="rank 0 did not answer rank 1's call"):
        roll_call(kept_store(), 1, 2, 0.2)
