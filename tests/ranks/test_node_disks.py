"""Ranks on nodes with disks of their own: one tier together, and the next one where a disk is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from devtools.processes import wait_until
from tests.client.conftest import Daemon, committed
from tests.ranks.conftest import RankError, Ranks

Start = Callable[..., Daemon]


def test_a_node_that_lost_its_disk_reads_the_next_tier(ranks: Ranks, own_daemon: Start, tmp_path: Path) -> None:
    daemons = [own_daemon(), own_daemon()]
    sockets = [daemon.socket for daemon in daemons]
    urls = [f"file://{tmp_path}/{{node}}/run", f"file://{tmp_path / 'shared'}"]
    near = [f"file://{tmp_path}/node{rank}/run" for rank in (0, 1)]
    ranks.open(urls, 2, sockets, every_steps=1)
    assert {answer["step"] for answer in ranks.each("restore")} == {0}
    weights = [answer["weights"] for answer in ranks.train(1, 2)]
    for step in (1, 2):
        ranks.each("wait", step=step)
    assert [committed(url) for url in near] == [[1, 2], [1, 2]]
    wait_until(lambda: 2 in committed(urls[1]), "step 2 in the shared tier", deadline_seconds=20)
    ranks.kill()
    for daemon in daemons:
        daemon.kill()
    shutil.rmtree(tmp_path / "node1")
    for daemon in daemons:
        daemon.start()

    ranks.open(urls, 2, sockets, every_steps=1)
    restored = ranks.each("restore")
    assert [(answer["step"], answer["source"], answer["generation"]) for answer in restored] == [(2, "storage", 2)] * 2
    assert [answer["tier"] for answer in restored] == [near[0], urls[1]]
    assert any(near[1] in notice for notice in restored[1]["notices"])
    assert [answer["weights"] for answer in restored] == weights
    ranks.train(3, 3)
    ranks.each("wait", step=3)
    assert [committed(url) for url in near] == [[1, 2, 3], [3]]  # the new disk is one of the run's
    wait_until(lambda: 3 in committed(urls[1]), "step 3 in the shared tier", deadline_seconds=20)
    ranks.each("close")

    # Both disks lost, and with them what the nodes held in memory.
    for daemon in daemons:
        daemon.kill()
        shutil.rmtree(tmp_path / f"node{daemons.index(daemon)}")
        daemon.start()
    ranks.open(urls, 2, sockets)
    restored = ranks.each("restore")
    assert [(answer["step"], answer["tier"], answer["generation"]) for answer in restored] == [(3, urls[1], 3)] * 2


def test_what_only_one_node_has_newest_sends_all_back(ranks: Ranks, own_daemon: Start, tmp_path: Path) -> None:
    """Step 2 is on the disks only, and one of them is lost: all take step 1 from the shared tier, or from their own."""
    daemons = [own_daemon(), own_daemon()]
    sockets = [daemon.socket for daemon in daemons]
    urls = [f"file://{tmp_path}/{{node}}/run", f"file://{tmp_path / 'shared'}"]
    ranks.open(urls, 2, sockets, every_steps=1)
    ranks.each("restore")
    weights = [answer["weights"] for answer in ranks.train(1, 1)]
    ranks.each("wait", step=1)
    wait_until(lambda: committed(urls[1]) == [1], "step 1 in the shared tier", deadline_seconds=20)
    # Nothing of step 2: what has its shards there is committed there by whoever comes next.
    hidden = [(tmp_path / "shared" / name, tmp_path / f"aside-{name}") for name in ("checkpoints", "manifests")]
    for folder, aside in hidden:
        folder.rename(aside)
        folder.write_text("no folder")
    ranks.train(2, 2)
    for step in (1, 2):
        ranks.each("wait", step=step)
    ranks.kill()
    for daemon in daemons:
        daemon.kill()
    for folder, aside in hidden:
        folder.unlink()
        aside.rename(folder)
    shutil.rmtree(tmp_path / "node1")
    for daemon in daemons:
        daemon.start()
    ranks.open(urls, 2, sockets)
    restored = ranks.each("restore")
    assert {answer["step"] for answer in restored} == {1}
    assert [answer["tier"] for answer in restored] == [f"file://{tmp_path}/node0/run", urls[1]]
    assert any("step 2-g1 was passed over" in notice for notice in restored[0]["notices"])
    assert [answer["weights"] for answer in restored] == weights


@pytest.mark.parametrize("places", [["{node}/run"], ["{node}/run", "{node}/second"]])
def test_without_a_shared_tier_all_ranks_are_told(
    ranks: Ranks, own_daemon: Start, tmp_path: Path, places: list[str]
) -> None:
    daemons = [own_daemon(), own_daemon()]
    with pytest.raises(RankError, match="add a tier that all nodes share") as refused:
        ranks.open([f"file://{tmp_path}/{place}" for place in places], 2, [daemon.socket for daemon in daemons])
    assert refused.value.kind == "ConfigError"
