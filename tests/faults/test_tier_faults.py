"""Two ranks, two tiers, and a real disk beneath one of them that takes nothing more, or goes away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptd.cli.daemon_call import call
from ckptd.wire.messages import GetStatus, Status
from devtools.processes import wait_until
from tests.client.conftest import Daemon, committed, own_daemon
from tests.faults.disk import SmallDisk
from tests.ranks.conftest import RankError, Ranks, ranks, workers

__all__ = ["own_daemon", "ranks", "workers"]

Start = Callable[..., Daemon]
Weights = list[list[str]]


@dataclass
class Scene:
    """A run of two ranks of one process group, which share a daemon."""

    ranks: Ranks
    node: Daemon
    disk: SmallDisk
    folder: Path
    on_disk: str
    elsewhere: str
    starts: int = 0

    def begin(self, *tiers: str) -> list[dict[str, Any]]:
        """A new start of the launch, with nothing left in memory; what each rank restored."""
        self.end()
        self.node.kill()
        self.node.start()
        self.ranks.group(2, self.folder)
        self.starts += 1
        self.ranks.open(list(tiers), 2, self.node.socket, launch=f"job#{self.starts}")
        return self.ranks.each("restore")

    def end(self) -> None:
        """All ranks leave, whether their last save has failed or not."""
        self.ranks.world = 2
        for rank in range(2):
            self.ranks[rank].start()
        with contextlib.suppress(RankError):
            self.ranks.each("close")
        self.ranks.each("ungroup")

    def save(self, step: int) -> Weights:
        """A step and its save, committed."""
        weights = [answer["weights"] for answer in self.ranks.each("save", step=step)]
        self.ranks.each("wait", step=step)
        return weights

    def link_error(self) -> str:
        """What the daemon says of the further tier."""
        (listed,) = call(self.node.socket, GetStatus(), Status, seconds=20).status["tiers"]["listed"]
        return str(listed["error"])


@pytest.fixture
def scene(ranks: Ranks, own_daemon: Start, disk: SmallDisk, tmp_path: Path) -> Scene:
    return Scene(ranks, own_daemon(), disk, tmp_path, f"file://{disk.root}/{tmp_path.name}", f"file://{tmp_path}/run")


def wait_for(url: str, step: int) -> None:
    wait_until(lambda: step in committed(url), f"step {step} in {url}", deadline_seconds=40)


def taken(restored: list[dict[str, Any]], step: int, tier: str, weights: Weights) -> None:
    """All ranks have that step from that tier, bit for bit."""
    assert {(answer["step"], answer["source"], answer["tier"]) for answer in restored} == {(step, "storage", tier)}
    assert [answer["weights"] for answer in restored] == weights


@pytest.mark.parametrize("fault", ["full", pytest.param("read_only", marks=pytest.mark.long)])
def test_a_further_tier_that_takes_nothing_holds_nobody_up(scene: Scene, fault: str) -> None:
    """Saves are committed near, the daemon says which tier it is, a restart begins all the same, and what was missed is
    copied when it can be."""
    near, far = scene.elsewhere, scene.on_disk
    scene.begin(near, far)
    scene.save(1)
    wait_for(far, 1)
    with getattr(scene.disk, fault)():
        weights = scene.save(2)
        wait_until(lambda: str(scene.disk.root) in scene.link_error(), "the tier's name", deadline_seconds=40)
        taken(scene.begin(near, far), 2, near, weights)
        weights = scene.save(3)
        assert committed(near) == [1, 2, 3]
        assert committed(far) == [1]
    wait_for(far, 3)
    taken(scene.begin(far), 3, far, weights)
    scene.end()


@pytest.mark.parametrize("fault", ["away", *(pytest.param(n, marks=pytest.mark.long) for n in ("full", "read_only"))])
def test_a_nearest_tier_that_takes_nothing_fails_saves_by_name_and_the_best_is_restored(
    scene: Scene, fault: str
) -> None:
    """It stands still, or vanishes, in the middle of the training. Whoever goes on without it has what the further tier
    has, and when it is back, the newest over both."""
    near, far = scene.on_disk, scene.elsewhere
    scene.begin(near, far)
    weights = scene.save(1)
    wait_for(far, 1)
    with getattr(scene.disk, fault)():
        scene.ranks.each("save", step=2)
        for rank in range(2):
            with pytest.raises(RankError, match=str(scene.disk.root)):
                scene.ranks[rank].do("wait", step=2)
        assert committed(far) == [1]
        if fault != "away":  # an empty folder may be a disk that was replaced
            with pytest.raises(RankError, match=str(scene.disk.root)):
                scene.begin(near, far)
        taken(scene.begin(far), 1, far, weights)
        weights = scene.save(3)
    taken(scene.begin(near, far), 3, far, weights)
    scene.save(4)
    assert committed(near) == [1, 4]
    scene.end()


@pytest.mark.long
def test_a_disk_that_was_replaced_while_it_was_away_is_the_runs_again(scene: Scene) -> None:
    """What is in its folder then is the run's as well, and lost when the old one is mounted over it: the further tier
    has it."""
    near, far = scene.on_disk, scene.elsewhere
    scene.begin(near, far)
    weights = scene.save(1)
    wait_for(far, 1)
    with scene.disk.away():
        taken(scene.begin(near, far), 1, far, weights)
        weights = scene.save(2)
        wait_for(far, 2)
        scene.end()
        scene.node.kill()
    assert committed(near) == [1]
    taken(scene.begin(near, far), 2, far, weights)
    scene.end()
