"""The node that has the store of the rendezvous is lost: what becomes of the others, and of what they had saved."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.exits import Exit
from devtools.processes import free_ports, wait_until
from tests.client.conftest import Daemon, committed
from tests.launch.conftest import SCRIPT
from tests.launch.launched import DONE_SECONDS, lines_of
from tests.launch.nodes import Node, Rendezvous

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]


@pytest.fixture(params=["c10d", "static"])
def nodes(own_daemon: Callable[..., Daemon], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    """The first one has the store."""
    port = str(free_ports(1)[0])
    of_all = ["--nnodes", "2", "--rdzv-backend", request.param]
    of_each = {
        "c10d": lambda number: ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"is_host={int(not number)}"],
        "static": lambda number: ["--master-addr", "127.0.0.1", "--master-port", port, "--node-rank", str(number)],
    }[request.param]
    found = [Node(f"node{number}", tmp_path, own_daemon(), [*of_all, *of_each(number)]) for number in range(2)]
    yield found
    for node in found:
        node.end()


def start(nodes: list[Node], folder: Path, name: str) -> None:
    for node in nodes:
        node.start("--rdzv-id", name, "--", SCRIPT, f"file://{folder / 'run'}", folder, "host")


def restored(folder: Path, rank: int) -> list[int]:
    return [line["restored"] for line in lines_of(folder / f"rank{rank}.jsonl") if "restored" in line]


def test_the_others_say_so_and_a_start_by_hand_goes_on(nodes: list[Node], tmp_path: Path) -> None:
    """Also where the host dies between two ranks' saves of a step, of which the other's part is never completed."""
    host, other = nodes
    run = f"file://{tmp_path / 'run'}"
    start(nodes, tmp_path, "first")
    assert host.wait() == -signal.SIGKILL
    assert other.wait() == Exit.RENDEZVOUS_LOST, other.output
    (failed,) = other.events("failed")
    assert failed["last_step"] == 20
    assert len(other.events("lost")) == 1
    assert re.search("ckptd: RendezvousLost: the nodes cannot meet any more.*sealed", other.output)
    assert "start it again on all nodes" in other.output
    newest = committed(run)[-1]
    assert newest == 15
    start(nodes, tmp_path, "second")
    for rank in (0, 1):
        wait_until(
            lambda rank=rank: restored(tmp_path, rank) == [0, newest],
            f"rank {rank} to go on",
            deadline_seconds=DONE_SECONDS,
            every_seconds=0.1,
        )
    other.signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [Exit.STOPPED] * 2


def test_a_store_elsewhere_may_go_while_a_training_runs(own_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """Workers need it to come together, and not to go on."""
    rendezvous = Rendezvous()
    nodes = [Node(f"node{number}", tmp_path, own_daemon(), rendezvous.options) for number in range(2)]
    try:
        run = f"file://{tmp_path / 'run'}"
        for node in nodes:
            node.start("--nnodes", "2", "--", SCRIPT, run, tmp_path, "long")
        wait_until(lambda: bool(committed(run)), "a commit", deadline_seconds=DONE_SECONDS, every_seconds=0.1)
        rendezvous.close()
        there = len(committed(run))
        wait_until(
            lambda: len(committed(run)) > there + 20 or committed(run)[-1] > 400,
            "many further commits",
            deadline_seconds=DONE_SECONDS,
            every_seconds=0.1,
        )
        nodes[1].signal(signal.SIGTERM)
        assert [node.wait() for node in nodes] == [Exit.STOPPED] * 2, "".join(node.output for node in nodes)
        assert all("the store of the rendezvous is gone" in node.output for node in nodes)
        assert not any(node.events("failed") for node in nodes)
    finally:
        for node in nodes:
            node.end()
