"""Two launchers, each with a node of its own, decide together: when to go back, when to give up, when to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.errors import CrashLoop, TrainingStopped
from ckptd.format.keys import Version
from devtools.processes import wait_until
from tests.client.conftest import Daemon, committed
from tests.launch.conftest import SCRIPT
from tests.launch.nodes import DONE_SECONDS, Node, Rendezvous

pytestmark = pytest.mark.long


@pytest.fixture
def nodes(own_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[list[Node]]:
    rendezvous = Rendezvous()
    found = [Node(f"node{number}", tmp_path, own_daemon(), rendezvous.options) for number in range(2)]
    yield found
    for node in found:
        node.end()
    rendezvous.close()


def start(nodes: list[Node], folder: Path, lives: int, *options: str) -> None:
    """A training of which so many lives end at step 8, on the second node."""
    for node in nodes:
        node.start("--nnodes", "2", *options, "--", SCRIPT, f"file://{folder / 'run'}", folder, "fails", str(lives))


def outputs(nodes: list[Node]) -> str:
    return "\n".join(node.output for node in nodes)


def test_a_crash_loop_ends_all_nodes_alike(nodes: list[Node], tmp_path: Path) -> None:
    start(nodes, tmp_path, 9, "--same-step-failures", "1")
    assert [node.wait() for node in nodes] == [CrashLoop.exit_code] * 2, outputs(nodes)
    assert [len(node.events("started")) for node in nodes] == [1, 1]
    assert all("ended with exit code 3" in node.output for node in nodes)


def test_they_go_back_once_and_not_once_each(nodes: list[Node], tmp_path: Path) -> None:
    start(nodes, tmp_path, 2, "--same-step-failures", "2", "--backoff", "0.1")
    assert [node.wait() for node in nodes] == [0, 0], outputs(nodes)
    assert [event["version"] for node in nodes for event in node.events("doubted")] == [str(Version(6, 1))]
    launches = [[event["launch"] for event in node.events("started")] for node in nodes]
    assert launches == [["job#0", "job#1", "job#2"]] * 2
    assert committed(f"file://{tmp_path / 'run'}")[-1] == 14


def test_a_signal_to_one_launcher_between_two_starts_stops_both(nodes: list[Node], tmp_path: Path) -> None:
    start(nodes, tmp_path, 9, "--same-step-failures", "9", "--backoff", "3600")
    wait_until(lambda: bool(nodes[1].events("waiting")), "a pause", deadline_seconds=DONE_SECONDS, every_seconds=0.1)
    nodes[1].signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [TrainingStopped.exit_code] * 2, outputs(nodes)
    assert [len(node.events("failed")) for node in nodes] == [2, 2]
