"""Whatever each rank could have, all restore the same step, and the report says what was decided, and why."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.client.conftest import Daemon, committed
from tests.ranks.conftest import ANSWER_SECONDS, RankError, Ranks

Start = Callable[..., Daemon]
SLOW = ("--bandwidth", "0.004")
"""Some seconds for each shard of these ranks."""


def sockets(nodes: Sequence[Daemon]) -> list[Path]:
    return [node.socket for node in nodes]


def agreed(restored: Sequence[dict[str, Any]], step: int, *words: str) -> str:
    """The one decision: that step, with all of these words in it."""
    assert {answer["step"] for answer in restored} == {step}, restored
    (decision,) = {answer["decision"] for answer in restored}
    for word in words:
        assert word in decision
    assert all(all(note in answer["notices"] for note in decision.split("; ")[1:]) for answer in restored)
    return str(decision)


def test_each_rank_offers_something_else(ranks: Ranks, own_daemon: Start, tmp_run: str) -> None:
    """Rank 0 has steps 30 and 20 in memory, rank 1 has 20 and 10, rank 2 was killed before it sealed 20 and its node is
    gone. Step 10 is what all can have."""
    nodes = [own_daemon() for _ in range(3)]
    ranks.open(tmp_run, 3, sockets(nodes))
    ranks.each("restore")
    weights = [answer["weights"] for answer in ranks.each("save", step=10)]
    ranks.each("wait", step=10)
    for step, savers in ((20, (0, 1)), (30, (0,))):
        for rank in savers:
            ranks[rank].do("save", step=step)
            ranks[rank].do("wait", step=step, stage="sealed")
    ranks.kill()
    nodes[2].kill()
    nodes[2].start()
    ranks.open(tmp_run, 3, sockets(nodes), idle_seconds=1)
    restored = ranks.each("restore")
    agreed(
        restored,
        10,
        "storage on rank 0, memory on rank 1, storage on rank 2",
        "step 30-g1 was passed over: it is not committed, and memory has 1 of its 3 snapshots, and none of rank 1",
        "step 20-g1 was passed over: it is not committed, and memory has 2 of its 3 snapshots, and none of rank 2",
    )
    assert [answer["weights"] for answer in restored] == weights


def test_ranks_on_each_others_nodes_wait_for_what_is_being_written(
    ranks: Ranks, own_daemon: Start, tmp_run: str
) -> None:
    """Both snapshots are in memory, each on the other rank's node, and not committed yet."""
    nodes = [own_daemon(*SLOW), own_daemon(*SLOW)]
    ranks.open(tmp_run, 2, sockets(nodes))
    ranks.each("restore")
    weights = [answer["weights"] for answer in ranks.each("save", step=1)]
    ranks.each("wait", step=1, stage="sealed")
    ranks.kill()
    assert committed(tmp_run) == []
    ranks.open(tmp_run, 2, sockets(nodes[::-1]))
    restored = ranks.each("restore")
    agreed(
        restored,
        1,
        "storage on ranks 0-1",
        "rank 0 not from memory: the snapshot of rank 0 is not in this node's memory",
        "rank 1 not from memory: the snapshot of rank 1 is not in this node's memory",
    )
    assert [answer["weights"] for answer in restored] == weights


def test_fewer_ranks_where_all_snapshots_are_on_their_node(ranks: Ranks, own_daemon: Start, tmp_run: str) -> None:
    """None of it committed: from memory alone."""
    here = own_daemon("--bandwidth", "0.001")
    ranks.open(tmp_run, 4, here.socket, seed=1, replicated=True)
    ranks.each("restore")
    weights = [answer["weights"] for answer in ranks.each("save", step=1)]
    ranks.each("wait", step=1, stage="sealed")
    ranks.kill()
    ranks.open(tmp_run, 3, here.socket, seed=2, replicated=True)
    restored = ranks.each("restore")
    agreed(restored, 1, "saved by 4 ranks", "memory on ranks 0-2")
    assert committed(tmp_run) == []
    assert [answer["weights"] for answer in restored] == weights[:3]  # all trained the same
    ranks.kill()


def test_fewer_ranks_where_no_node_has_all_snapshots(ranks: Ranks, own_daemon: Start, tmp_run: str) -> None:
    """One of them on a node that has none of it: all wait until it is committed, and read what memory has not."""
    near, far, fresh = own_daemon(*SLOW), own_daemon(*SLOW), own_daemon()
    ranks.open(tmp_run, 4, sockets([near, near, far, far]), seed=1, replicated=True)
    ranks.each("restore")
    weights = [answer["weights"] for answer in ranks.each("save", step=1)]
    ranks.each("wait", step=1, stage="sealed")
    ranks.kill()
    assert committed(tmp_run) == []
    ranks.open(tmp_run, 3, sockets([near, far, fresh]), seed=2, replicated=True)
    restored = ranks.each("restore")
    agreed(restored, 1, "storage on ranks 0-2", "rank 1 not from memory: the snapshot of rank 0 is not in this node's")
    assert [answer["weights"] for answer in restored] == weights[:3]  # all trained the same


def test_a_corrupt_snapshot_in_memory_is_read_from_storage(ranks: Ranks, own_daemon: Start, tmp_run: str) -> None:
    nodes, weights = _two_steps_on_two_nodes(ranks, own_daemon, tmp_run)
    _damage_in_memory(nodes[1], _shard(tmp_run, 2, rank=1))
    ranks.open(tmp_run, 2, sockets(nodes))
    restored = ranks.each("restore")
    agreed(restored, 2, "memory on rank 0, storage on rank 1", "rank 1 not from memory: block")
    assert [answer["weights"] for answer in restored] == weights[2]


def test_what_is_corrupt_in_memory_and_in_storage_sends_all_back(ranks: Ranks, own_daemon: Start, tmp_run: str) -> None:
    nodes, weights = _two_steps_on_two_nodes(ranks, own_daemon, tmp_run)
    shard = _shard(tmp_run, 2, rank=1)
    _damage_in_memory(nodes[1], shard)
    _damage(shard)
    ranks.open(tmp_run, 2, sockets(nodes))
    restored = ranks.each("restore")
    agreed(restored, 1, "memory on ranks 0-1", "step 2-g1 was passed over: rank 1: ")
    assert [answer["weights"] for answer in restored] == weights[1]


def test_a_corrupt_manifest_sends_all_back_where_memory_is_lost(ranks: Ranks, own_daemon: Start, tmp_run: str) -> None:
    """One rank could still have the newer step from its memory."""
    nodes, weights = _two_steps_on_two_nodes(ranks, own_daemon, tmp_run)
    (manifest,) = Path(tmp_run.removeprefix("file://")).glob("manifests/*02-g*.json")
    _damage(manifest)
    nodes[1].kill()
    nodes[1].start()
    ranks.open(tmp_run, 2, sockets(nodes))
    restored = ranks.each("restore")
    agreed(restored, 1, "memory on rank 0, storage on rank 1", "step 2-g1 was passed over: ")
    assert [answer["weights"] for answer in restored] == weights[1]


def test_a_step_that_the_store_refused_is_nobodys(ranks: Ranks, own_daemon: Start, tmp_run: str) -> None:
    """Its save has failed on all ranks, and none of them takes it up from memory."""
    nodes = [own_daemon(), own_daemon()]
    ranks.open(tmp_run, 2, sockets(nodes))
    ranks.each("restore")
    weights = [answer["weights"] for answer in ranks.each("save", step=1)]
    ranks.each("wait", step=1)
    folder = Path(tmp_run.removeprefix("file://")) / "checkpoints"
    folder.rename(folder.with_name("aside"))
    folder.touch()  # whoever is root may write into any folder
    ranks.each("save", step=2)
    for rank in range(2):
        with pytest.raises(RankError, match="is not a folder"):
            ranks[rank].do("wait", step=2)
    ranks.kill()
    ranks.open(tmp_run, 2, sockets(nodes))
    restored = ranks.each("restore")
    agreed(restored, 1, "memory on ranks 0-1")
    assert [answer["weights"] for answer in restored] == weights


def _two_steps_on_two_nodes(
    ranks: Ranks, own_daemon: Start, url: str
) -> tuple[list[Daemon], dict[int, list[list[str]]]]:
    """Steps 1 and 2 are committed, and their snapshots in memory; the ranks are dead."""
    nodes = [own_daemon(), own_daemon()]
    ranks.open(url, 2, sockets(nodes), every_steps=1)
    ranks.each("restore")
    weights = {step: [answer["weights"] for answer in ranks.train(step, step)] for step in (1, 2)}
    ranks.each("wait", step=2)
    ranks.kill()
    return nodes, weights


def _shard(url: str, step: int, *, rank: int) -> Path:
    pattern = f"checkpoints/*{step:04d}-g*/rank-{rank:05d}-*.safetensors"
    (found,) = Path(url.removeprefix("file://")).glob(pattern)
    return found


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def _damage_in_memory(node: Daemon, shard: Path) -> None:
    """Flip a bit of the snapshot that this shard was written from, in the daemon's own memory."""
    tail = shard.read_bytes()[-200:]
    found = 0
    for link in Path(f"/proc/{node.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a descriptor that the daemon closes meanwhile
            if "memfd:" not in os.readlink(link):
                continue
            with link.open("r+b") as memory:
                at = memory.read().find(tail)
                if at >= 0:
                    memory.seek(at + 100)
                    memory.write(bytes([tail[100] ^ 1]))
                    found += 1
    assert found == 1
    assert psutil.pid_exists(node.pid)


# Ranks that ask for different things, and one that fails by itself


def saved_once(ranks: Ranks, socket: Path, url: str | list[str]) -> list[list[str]]:
    """A checkpoint of two ranks that are then closed; their weights."""
    ranks.open(url, 2, socket)
    ranks.each("restore")
    weights = [answer["weights"] for answer in ranks.each("save", step=3)]
    ranks.each("wait", step=3)
    ranks.each("close")
    return weights


@pytest.mark.parametrize(("culprit", "how"), [(0, "module"), (1, "object")])
def test_a_rank_whose_state_cannot_be_had_ends_the_restore_on_all(
    ranks: Ranks, daemon: Daemon, tmp_run: str, culprit: int, how: str
) -> None:
    """By an error of the training's own code: the others hear of it, and do not wait for a vote that never comes."""
    saved_once(ranks, daemon.socket, tmp_run)
    ranks.open(tmp_run, 2, daemon.socket)
    before = [answer["weights"] for answer in ranks.each("weights_now")]
    ranks[culprit].do("spoil", how=how)
    for error in failures(ranks, lambda _: {}):
        assert f"rank {culprit}: " in str(error)
        assert "RuntimeError: the training's own trouble" in str(error)
    assert [answer["weights"] for answer in ranks.each("weights_now")] == before


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"step": 3}, {}, "step=3"),
        ({"step": 0}, {}, "generation"),
        ({}, {"step": 0}, "generation"),
        ({"strict": False}, {}, "strict=False"),
        ({"required": True}, {}, "required=True"),
    ],
)
def test_ranks_that_ask_for_different_restores_are_told_at_once(
    ranks: Ranks, daemon: Daemon, tmp_run: str, one: dict[str, Any], other: dict[str, Any], words: str
) -> None:
    ranks.open(tmp_run, 2, daemon.socket)
    for error in failures(ranks, lambda rank: other if rank else one):
        assert error.kind == "UsageError"
        assert words in str(error)


def test_ranks_may_take_different_parts(ranks: Ranks, daemon: Daemon, tmp_path: Path) -> None:
    """From a run with two tiers, where all say which one they have read if all have read everything."""
    url = [f"file://{tmp_path}/{tier}" for tier in ("near", "far")]
    weights = saved_once(ranks, daemon.socket, url)
    ranks.open(url, 2, daemon.socket)
    restored = ranks.each("restore", lambda rank: {"include": ["model"]} if rank else {})
    assert [answer["weights"] for answer in restored] == weights
    assert len(restored[1]["loaded"]) < len(restored[0]["loaded"])
    ranks.each("save", step=4)
    ranks.each("wait", step=4)


def failures(ranks: Ranks, options: Callable[[int], dict[str, Any]]) -> list[RankError]:
    """What each rank raises when all restore at once."""

    def fails(rank: int) -> RankError:
        with pytest.raises(RankError) as raised:
            ranks[rank].do("restore", **options(rank))
        return raised.value

    with ThreadPoolExecutor(ranks.world) as pool:
        calls = [pool.submit(fails, rank) for rank in range(ranks.world)]
        try:
            return [call.result(ANSWER_SECONDS) for call in calls]
        except TimeoutError:
            ranks.kill()
            raise
