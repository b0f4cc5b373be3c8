"""Nodes that go and come under ``ckptd run --nnodes 1:2``, and what must be true of the training's whole history."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.errors import TrainingStopped
from devtools.processes import wait_until
from tests.client.conftest import Daemon
from tests.examples.history import History
from tests.launch.nodes import DONE_SECONDS, Node, Rendezvous

WINDOWS = 48
EVERY = 4


class Training:
    """``examples.elastic`` on nodes that share nothing but the rendezvous and the run."""

    def __init__(self, folder: Path, own_daemon: Callable[..., Daemon]) -> None:
        self._folder = folder
        self._own_daemon = own_daemon
        self._rendezvous = Rendezvous()
        self.nodes: list[Node] = []
        self.events = folder / "events"
        self.events.mkdir()
        self.history = History(self.events)

    def add_node(self) -> Node:
        """A new machine, that wants to take part."""
        node = Node(f"node{len(self.nodes)}", self._folder, self._own_daemon(), self._rendezvous.options)
        self.nodes.append(node)
        script = ["-m", "--", "examples.elastic", self._folder / "run", "--steps", "100000", "--every", str(EVERY)]
        options = ["--windows", str(WINDOWS), "--events", self.events, "--digests", "--pause", "0.05"]
        node.start("--nnodes", "1:2", *script, *options)
        return node

    def await_steps(self, world: int, after: int = 0, count: int = 3 * EVERY) -> int:
        """Until a life after that one, of so many ranks, has done so many steps and has committed one. Its number."""

        def found() -> int | None:
            assert any(node.runs for node in self.nodes), self.outputs
            lives = len(self.history.worlds())
            return next((number for number in range(after + 1, lives + 1) if self._has_got(number, world, count)), None)

        try:
            wait_until(lambda: found() is not None, "a life", deadline_seconds=DONE_SECONDS, every_seconds=0.2)
        except BaseException:
            print(self.outputs)
            raise
        return found() or 0

    def _has_got(self, generation: int, world: int, count: int) -> bool:
        if not any((self._folder / "run" / "manifests").glob(f"*-g{generation:06d}.json")):
            return False
        logs = [self.history.log(generation, rank) for rank in range(world)]
        return all(sum(event["event"] == "step" for event in log) >= count for log in logs)

    @property
    def outputs(self) -> str:
        return "\n".join(node.output[-5000:] for node in self.nodes)

    def close(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.end()
        self._rendezvous.close()


@pytest.fixture
def training(own_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Training]:
    found = Training(tmp_path, own_daemon)
    yield found
    found.close()


def check(history: History, worlds: list[int]) -> None:
    """One node may have begun before the other one came; from then on the lives had so many ranks."""
    found = history.worlds()
    assert found in (worlds, [1, *worlds])
    for generation in range(2, len(found) + 1):
        if found == worlds or generation > 2 or history.log(2)[0]["step"]:  # else the other one came before any step
            history.check_hand_over(generation)
    history.check_samples(found, WINDOWS)


@pytest.mark.timeout(400)
def test_a_node_is_lost_and_the_other_one_goes_on(training: Training) -> None:
    """From the newest checkpoint that is committed, with what both had between them."""
    lost, stays = training.add_node(), training.add_node()
    both = training.await_steps(world=2)
    lost.end()
    training.await_steps(world=1, after=both, count=6 * EVERY)
    stays.signal(signal.SIGTERM)
    assert stays.wait() == TrainingStopped.exit_code, training.outputs
    check(training.history, [2, 1])
    (failed,) = stays.events("failed")
    assert "ended with exit code 1" in failed["text"]
    launches = [event["launch"] for event in stays.events("started")]
    assert len(set(launches)) == len(launches) >= 2, "no launch id comes twice"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_node_is_lost_and_another_one_joins(training: Training) -> None:
    """The loss costs what was not committed; the joining costs nothing, since all save before it."""
    lost, stays = training.add_node(), training.add_node()
    both = training.await_steps(world=2)
    lost.end()
    alone = training.await_steps(world=1, after=both, count=6 * EVERY)
    joins = training.add_node()
    training.await_steps(world=2, after=alone)
    joins.signal(signal.SIGTERM)
    assert [stays.wait(), joins.wait()] == [TrainingStopped.exit_code] * 2, training.outputs
    check(training.history, [2, 1, 2])
    last = [event["step"] for event in training.history.log(alone) if event["event"] == "step"][-1]
    assert training.history.log(alone + 1)[0]["step"] == last
    (launch,) = [event["launch"] for event in joins.events("started")]
    assert stays.events("started")[-1]["launch"] == launch
    assert len(stays.events("failed")) == 1
    (stopped,) = joins.events("stopped")
    assert stopped["safe"]
