"""``ckptd run`` with torchrun's static rendezvous: nodes that are told who they are, and meet at the first one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from devtools.processes import free_ports, wait_until
from tests.client.conftest import Daemon, committed
from tests.launch.conftest import SCRIPT
from tests.launch.launched import DONE_SECONDS, lines_of
from tests.launch.nodes import Node

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def nodes(own_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[list[Node]]:
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0])]
    found = [Node(f"node{number}", tmp_path, own_daemon(), [*where, "--node-rank", str(number)]) for number in range(2)]
    yield found
    for node in found:
        node.end()


def start(node: Node, folder: Path, scenario: str, *options: str) -> None:
    node.start(*options, "--", SCRIPT, f"file://{folder / 'run'}", folder, scenario, "1")


def outputs(nodes: list[Node]) -> str:
    return "\n".join(node.output for node in nodes)


def restored(folder: Path, rank: int) -> list[int]:
    return [line["restored"] for line in lines_of(folder / f"rank{rank}.jsonl") if "restored" in line]


@pytest.mark.long
def test_a_rank_that_fails_is_started_anew_on_both_nodes(nodes: list[Node], tmp_path: Path) -> None:
    for node in nodes:
        start(node, tmp_path, "fails")
    assert [node.wait() for node in nodes] == [0, 0], outputs(nodes)
    launches = [[event["launch"].partition("#") for event in node.events("started")] for node in nodes]
    assert launches[0] == launches[1]
    assert [number for _, _, number in launches[0]] == ["0", "1"]
    assert [restored(tmp_path, rank) for rank in (0, 1)] == [[0, 6]] * 2
    assert committed(f"file://{tmp_path / 'run'}")[-1] == 14


@pytest.mark.long
def test_a_launcher_that_was_killed_comes_back_by_hand(nodes: list[Node], tmp_path: Path) -> None:
    for node in nodes:
        start(node, tmp_path, "long")
    run = f"file://{tmp_path / 'run'}"
    wait_until(lambda: bool(committed(run)), "a commit", deadline_seconds=DONE_SECONDS, every_seconds=0.1)
    nodes[1].signal(signal.SIGKILL)
    nodes[1].wait()
    start(nodes[1], tmp_path, "long")
    wait_until(
        lambda: all(len(restored(tmp_path, rank)) == 2 for rank in (0, 1)),
        "the second start",
        deadline_seconds=DONE_SECONDS,
        every_seconds=0.1,
    )
    nodes[0].signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [15, 15], outputs(nodes)
    launches = [[event["launch"].rpartition("#")[2] for event in node.events("started")] for node in nodes]
    assert launches == [["0", "1"]] * 2, "it comes to no start that is over"
