"""A script that comes back smaller, and then larger, and what must be true of its whole history.

The launcher is a loop in here, as it is in torchrun: it starts so many ranks, ends the group when one of them dies, and
starts as many as are left, with the same command line.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.wire.channel import SOCKET_VARIABLE
from devtools.processes import free_ports, kill_group, wait_until
from tests.client.conftest import Daemon
from tests.examples.history import History

ROOT = Path(__file__).parents[2]
WINDOWS = 96
"""Samples of an epoch: whole steps of two data ranks as well as of three."""
EVERY = 4
WAIT_SECONDS = 100
STEPS = 110
HandOvers = tuple[tuple[int, int, str], ...]
"""Ranks before, ranks after, and where these find the state."""
THERE_AND_BACK: HandOvers = ((4, 3, "memory"), (3, 4, "storage"))
TWICE: HandOvers = (*THERE_AND_BACK, (4, 3, "storage"), (3, 4, "memory"))


class Launcher:
    """Starts one group of ranks after the other, and reads what they log."""

    def __init__(self, folder: Path, socket: Path, steps: int) -> None:
        self.events = folder / "events"
        self.events.mkdir()
        self.history = History(self.events)
        self.output = folder / "output.txt"
        self._run = folder / "run"
        self._steps = steps
        self._environment = {SOCKET_VARIABLE: str(socket), "TORCHELASTIC_RUN_ID": "elastic", "MASTER_ADDR": "127.0.0.1"}
        self._starts = 0
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "tests.examples.group"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, world: int) -> None:
        """The next life of the training."""
        environment = {
            **self._environment,
            "WORLD_SIZE": str(world),
            "MASTER_PORT": str(free_ports(1)[0]),
            "TORCHELASTIC_RESTART_COUNT": str(self._starts),
        }
        argv = [str(self._run), "--steps", str(self._steps), "--every", str(EVERY), "--windows", str(WINDOWS)]
        argv += ["--events", str(self.events), "--digests"]
        self._do("start", argv=argv, environment=environment, output=str(self.output))
        self._starts += 1

    def end(self) -> None:
        """Of the whole group; on return it is gone."""
        self._do("end")

    def await_steps(self, count: int) -> None:
        """Until the present life has done so many steps of its own, and has committed one."""
        generation = self._starts

        def done() -> bool:
            assert not self._do("look")["ended"], self.output.read_text()[-5000:]
            steps = [event for event in self.log(generation) if event["event"] == "step"]
            return len(steps) >= count and any((self._run / "manifests").glob(f"*-g{generation:06d}.json"))

        wait_until(done, f"{count} steps of life {generation}", deadline_seconds=WAIT_SECONDS)

    def kill_a_rank(self, rank: int) -> None:
        """And let the loop notice."""
        os.kill(self.log(self._starts, rank)[0]["pid"], signal.SIGKILL)
        wait_until(lambda: self._do("look")["ended"], "a death", deadline_seconds=WAIT_SECONDS)

    def await_end(self) -> None:
        """Of the training, by itself."""
        wait_until(lambda: not self._do("look")["running"], "the end", deadline_seconds=WAIT_SECONDS)
        assert set(self._do("look")["ended"]) == {0}, self.output.read_text()[-5000:]

    def log(self, generation: int, rank: int = 0) -> list[dict[str, Any]]:
        """Of one life of one rank."""
        return self.history.log(generation, rank)

    def _do(self, what: str, **options: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **options}).encode() + b"\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End all of it."""
        kill_group(self._process)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def here(own_daemon: Callable[..., Daemon]) -> Daemon:
    return own_daemon()


@pytest.fixture
def launcher(tmp_path: Path, here: Daemon) -> Iterator[Launcher]:
    found = Launcher(tmp_path, here.socket, STEPS)
    yield found
    found.close()


@pytest.mark.timeout(240)
@pytest.mark.long
@pytest.mark.parametrize("hand_overs", [THERE_AND_BACK, TWICE], ids=["once", "twice"])
def test_a_script_comes_back_smaller_and_larger(launcher: Launcher, here: Daemon, hand_overs: HandOvers) -> None:
    """A rank is lost at any step, and comes back at any step; the daemon survives, or does not."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for world, following, source in hand_overs:
        launcher.start(world)
        launcher.await_steps(chance.randint(EVERY + 1, 3 * EVERY))
        if following < world:
            launcher.kill_a_rank(chance.randrange(world))
        launcher.end()
        if source == "storage":
            here.kill()
            here.start()
    launcher.start(hand_overs[-1][1])
    launcher.await_end()

    for generation, (_, world, source) in enumerate(hand_overs, 2):
        starts = [launcher.log(generation, rank)[0] for rank in range(world)]
        assert {start["layout"] for start in starts} == {"2x2" if world == 4 else "FSDP over 3"}
        assert len({(start["step"], start["decision"]) for start in starts}) == 1
        assert f"{source} on ranks 0-{world - 1}" in starts[0]["decision"]
        launcher.history.check_hand_over(generation)
    assert launcher.history.check_samples([hand_overs[0][0], *(world for _, world, _ in hand_overs)], WINDOWS) == STEPS
