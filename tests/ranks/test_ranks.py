"""Several ranks, as plain processes with a launch id: they commit together, and restore one decision."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from devtools.processes import wait_until
from tests.client.conftest import Daemon, committed
from tests.ranks.conftest import RankError, Ranks

Start = Callable[..., Daemon]


def test_four_ranks_commit_and_restore_from_memory(ranks: Ranks, daemon: Daemon, tmp_run: str) -> None:
    ranks.open(tmp_run, 4, daemon.socket, every_steps=2)
    assert {answer["step"] for answer in ranks.each("restore")} == {0}
    weights = [answer["weights"] for answer in ranks.train(1, 4)]
    ranks.each("wait", step=4)
    assert committed(tmp_run) == [2, 4]
    ranks.each("close")

    ranks.open(tmp_run, 4, daemon.socket)
    restored = ranks.each("restore")
    assert {(answer["step"], answer["source"], answer["generation"]) for answer in restored} == {(4, "memory", 2)}
    assert [answer["weights"] for answer in restored] == weights  # each rank its own


def test_one_rank_killed_before_its_seal_leaves_the_step_before(ranks: Ranks, daemon: Daemon, tmp_run: str) -> None:
    ranks.open(tmp_run, 2, daemon.socket, every_steps=1)
    ranks.each("restore")
    weights = [answer["weights"] for answer in ranks.train(1, 2)]
    ranks.each("wait", step=2)
    ranks[0].do("train", step=3)
    ranks[0].do("wait", step=3, stage="sealed")
    ranks[1].kill()  # never took step 3
    ranks.kill()
    ranks.open(tmp_run, 2, daemon.socket, every_steps=1)
    restored = ranks.each("restore")
    assert {answer["step"] for answer in restored} == {2}
    assert [answer["weights"] for answer in restored] == weights
    assert committed(tmp_run) == [1, 2]
    ranks.train(3, 3)
    ranks.each("wait", step=3)
    assert committed(tmp_run) == [1, 2, 3]


def test_who_takes_over_does_not_wait_for_ranks_that_stand_still(
    ranks: Ranks, others: Ranks, daemon: Daemon, tmp_run: str
) -> None:
    """One of the first ranks has sealed a step that the other one has not come to, and both hang."""
    ranks.open(tmp_run, 2, daemon.socket, every_steps=1, slots=1)
    ranks.each("restore")
    weights = [answer["weights"] for answer in ranks.train(1, 2)]
    ranks.each("wait", step=2)
    ranks[0].do("train", step=3)
    ranks[0].do("wait", step=3, stage="sealed")
    for rank in (0, 1):
        ranks[rank].signal(signal.SIGSTOP)
    others.open(tmp_run, 2, daemon.socket, takeover=True, idle_seconds=10_000)
    restored = others.each("restore")
    assert {answer["step"] for answer in restored} == {2}
    assert [answer["weights"] for answer in restored] == weights
    others.each("close")
    ranks.kill()


def test_r125_only_a_step_that_every_rank_holds_is_restored(ranks: Ranks, own_daemon: Start, tmp_run: str) -> None:
    """Rank 0 holds steps 10 and 11 in memory, rank 1 only 10, and storage is too slow for either."""
    near, far = own_daemon("--bandwidth", "0.001"), own_daemon("--bandwidth", "0.001")
    ranks.open(tmp_run, 2, [near.socket, far.socket])
    ranks.each("restore")
    for rank in (0, 1):
        ranks[rank].do("save", step=10)
        ranks[rank].do("wait", step=10, stage="sealed")
    ranks[0].do("save", step=11)
    ranks[0].do("wait", step=11, stage="sealed")
    ranks.kill()
    ranks.open(tmp_run, 2, [near.socket, far.socket])
    restored = ranks.each("restore")
    assert {(answer["step"], answer["source"]) for answer in restored} == {(10, "memory")}
    ranks.kill()


def test_memory_lost_on_one_node_sends_all_to_storage(ranks: Ranks, own_daemon: Start, tmp_run: str) -> None:
    near, far = own_daemon(), own_daemon()
    ranks.open(tmp_run, 2, [near.socket, far.socket], every_steps=1)
    ranks.each("restore")
    weights = [answer["weights"] for answer in ranks.train(1, 2)]
    ranks.each("wait", step=2)
    ranks.kill()
    far.kill()
    far.start()
    ranks.open(tmp_run, 2, [near.socket, far.socket])
    restored = ranks.each("restore")
    assert {answer["step"] for answer in restored} == {2}
    assert [answer["source"] for answer in restored] == ["memory", "storage"]
    assert [answer["weights"] for answer in restored] == weights


def test_rank_0s_daemon_is_killed_before_the_manifest(ranks: Ranks, own_daemon: Start, tmp_run: str) -> None:
    near, far = own_daemon(), own_daemon("--commit-takeover", "1")
    ranks.open(tmp_run, 2, [near.socket, far.socket])
    ranks.each("restore")
    ranks[0].do("save", step=1)
    ranks[0].do("wait", step=1, stage="durable")
    ranks[0].kill()
    near.kill()  # knows of no receipt of rank 1's yet
    ranks[1].do("save", step=1)
    ranks[1].do("wait", step=1, stage="committed")  # by its own daemon
    assert committed(tmp_run) == [1]


def test_due_by_time_all_ranks_take_the_same_steps(ranks: Ranks, daemon: Daemon, tmp_run: str) -> None:
    """Appointments, with ranks that run at different speeds and clocks that say nothing to each other."""
    ranks.open(tmp_run, 4, daemon.socket, every=0.5)
    ranks.each("restore")
    taken: list[set[int]] = [set() for _ in range(4)]
    step = 0
    while min(map(len, taken)) < 2 and step < 600:
        step += 1
        for rank in (step % 4, (step + 2) % 4, (step + 1) % 4, (step + 3) % 4):  # uneven order
            if ranks[rank].do("train", step=step)["saved"]:
                taken[rank].add(step)
        time.sleep(0.1)
    assert len(taken[0]) >= 2
    assert taken[0] == taken[1] == taken[2] == taken[3]
    for done in sorted(taken[0]):
        ranks.each("wait", step=done)
    assert set(committed(tmp_run)) == taken[0]


def test_a_rank_without_a_free_slot_lets_the_others_go(ranks: Ranks, own_daemon: Start, tmp_run: str) -> None:
    fast, slow = own_daemon(), own_daemon("--bandwidth", "0.01")
    ranks.open(tmp_run, 2, [fast.socket, slow.socket], slots=1, max_wait=0.2)
    ranks.each("restore")
    ranks.each("save", step=1)
    ranks.each("save", step=2)  # rank 1's only slot still holds step 1
    with pytest.raises(RankError, match="no free slot") as caught:
        ranks[1].do("wait", step=2)
    assert caught.value.kind == "SaveSkipped"
    with pytest.raises(RankError, match="rank 1 takes no part"):
        ranks[0].do("wait", step=2)
    ranks.kill()


def test_r74_rank_0_decides_for_all(ranks: Ranks, daemon: Daemon, tmp_run: str) -> None:
    """A listing that shows nothing to one rank must not send it another way: only rank 0 lists."""
    ranks.open(tmp_run, 2, daemon.socket, every_steps=1)
    ranks.each("restore")
    ranks.train(1, 1)
    ranks.each("wait", step=1)
    ranks.each("close")
    # Rank 1 can't see the manifests at all; what it is told by rank 0 is enough.
    root = Path(tmp_run.removeprefix("file://"))
    ranks.open(tmp_run, 2, daemon.socket)
    assert [answer["step"] for answer in ranks.each("restore")] == [1, 1]
    assert len(list((root / "agreement").rglob("*.json"))) > 0


def test_a_corrupt_shard_of_one_rank_sends_all_back_together(ranks: Ranks, own_daemon: Start, tmp_run: str) -> None:
    here = own_daemon()
    ranks.open(tmp_run, 2, here.socket, every_steps=1)
    ranks.each("restore")
    weights = [answer["weights"] for answer in ranks.train(1, 1)]
    ranks.train(2, 2)
    ranks.each("wait", step=2)
    ranks.kill()
    here.kill()
    (shard,) = Path(tmp_run.removeprefix("file://")).glob("checkpoints/*0002-g*/rank-00001-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    here.start()
    ranks.open(tmp_run, 2, here.socket)
    restored = ranks.each("restore")
    assert {answer["step"] for answer in restored} == {1}
    assert [answer["weights"] for answer in restored] == weights
    assert all("rank 1" in answer["notices"][0] for answer in restored)


def test_a_stopped_rank_holds_nobody_but_its_own_step(ranks: Ranks, daemon: Daemon, tmp_run: str) -> None:
    ranks.open(tmp_run, 2, daemon.socket)
    ranks.each("restore")
    ranks[1].signal(signal.SIGSTOP)
    for step in (1, 2, 3):
        ranks[0].do("save", step=step)
        ranks[0].do("wait", step=step, stage="durable")
    assert committed(tmp_run) == []
    ranks[1].signal(signal.SIGCONT)
    for step in (1, 2, 3):
        ranks[1].do("save", step=step)
    ranks.each("wait", step=3)
    wait_until(lambda: committed(tmp_run) == [1, 2, 3], "all three", deadline_seconds=30)
