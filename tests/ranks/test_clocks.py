"""Machines whose clocks differ by hours, and jump: nothing that counts asks them what time it is."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptd.cli.daemon_call import call
from ckptd.errors import RunInUse
from ckptd.wire.messages import GetStatus, Status
from ckptd_client import Checkpointer
from devtools.processes import wait_until
from tests.client.conftest import Daemon, Training, committed
from tests.ranks.conftest import Ranks

HOUR = 3600.0


@dataclass
class Machine:
    """A node with a clock of its own."""

    daemon: Daemon
    clock: Path

    def set(self, ahead_seconds: float) -> None:
        """For its daemon and its rank."""
        self.clock.write_text(str(ahead_seconds))

    def status(self) -> dict[str, Any]:
        return call(self.daemon.socket, GetStatus(), Status, seconds=20).status


@pytest.fixture
def machines(private_folders: Path, tmp_path: Path) -> Iterator[list[Machine]]:
    """Two; started by the test."""
    name = uuid.uuid4().hex[:8]
    found: list[Machine] = []
    for number in range(2):
        clock = tmp_path / f"clock-{number}"
        under = (sys.executable, "-m", "tests.ranks.clock", str(clock))
        found.append(Machine(Daemon(private_folders / f"{name}-{number}", under=under), clock))
        found[-1].set(0.0)
    yield found
    for machine in found:
        machine.daemon.kill()


def begin(ranks: Ranks, machines: list[Machine], url: str, **options: Any) -> list[dict[str, Any]]:
    """A new start; what each rank restored."""
    for rank, machine in enumerate(machines):
        ranks[rank].start()
        ranks[rank].do("follow_clock", file=str(machine.clock))
    ranks.open(url, 2, [machine.daemon.socket for machine in machines], **options)
    return ranks.each("restore")


@pytest.mark.parametrize("ahead", [(7 * HOUR, -9 * HOUR), pytest.param((-30 * HOUR, 2 * HOUR), marks=pytest.mark.long)])
def test_clocks_that_differ_by_hours_and_jump_change_nothing(
    ranks: Ranks, machines: list[Machine], tmp_run: str, ahead: tuple[float, float]
) -> None:
    """Commits, retention, claims, the decision: all of it is as with right clocks."""
    for machine, seconds in zip(machines, ahead, strict=True):
        machine.set(seconds)
        machine.daemon.start()
    assert {answer["step"] for answer in begin(ranks, machines, tmp_run, every_steps=1, keep=2)} == {0}
    for step in range(1, 7):
        if step == 4:  # both are set, one forwards and one back
            for machine, seconds in zip(machines, reversed(ahead), strict=True):
                machine.set(seconds)
        weights = [answer["weights"] for answer in ranks.train(step, step)]
        ranks.each("wait", step=step)
    wait_until(lambda: committed(tmp_run) == [5, 6], "retention", deadline_seconds=30)
    assert [machine.status()["failures"] for machine in machines] == [[], []]

    # Another launch, with a right clock, cannot take the run from a writer that lives.
    training = Training()
    other = Daemon(machines[0].daemon.socket.parent.with_name(f"other-{uuid.uuid4().hex[:8]}"))
    other.start()
    try:
        with (
            pytest.raises(RunInUse),
            Checkpointer(tmp_run, training.state, socket=other.socket, launch="other") as ckpt,
        ):
            ckpt.restore(step=0)
    finally:
        other.kill()

    ranks.each("close")
    restored = begin(ranks, machines, tmp_run, every_steps=1, keep=2)
    assert {(answer["step"], answer["source"], answer["generation"]) for answer in restored} == {(6, "memory", 2)}
    assert [answer["weights"] for answer in restored] == weights
    ranks.each("close")
    for machine, seconds in zip(machines, ahead, strict=True):
        machine.daemon.kill()
        machine.set(seconds)
        machine.daemon.start()
    restored = begin(ranks, machines, tmp_run, every_steps=1, keep=2)
    assert {(answer["step"], answer["source"], answer["generation"]) for answer in restored} == {(6, "storage", 3)}
    assert [answer["weights"] for answer in restored] == weights
    ranks.train(7, 7)
    ranks.each("wait", step=7)
    wait_until(lambda: committed(tmp_run) == [6, 7], "retention", deadline_seconds=30)
