"""Groups of small real processes, and what is done to them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ckptd.errors import TrainingStopped
from ckptd_client.launch.council import Council
from ckptd_client.launch.journal import Journal
from ckptd_client.launch.lookout import Lookout
from ckptd_client.launch.policy import History, RestartRules
from ckptd_client.launch.supervisor import Supervisor
from devtools.processes import wait_until
from tests.client.conftest import Daemon

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def group() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts processes by a line of shell, and gives the signals back in the end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    started: list[subprocess.Popen[bytes]] = []

    def start(line: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sh", "-c", line], start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)
    for number, handler in before.items():
        signal.signal(number, handler)


def supervisor(daemon: Daemon, stop_seconds: float) -> Supervisor:
    found = Supervisor(RestartRules(), Lookout(daemon.socket), Journal(None), stop_seconds=stop_seconds)
    found.starting("test#0", Council.alone(), History())
    return found


def look_until_over(found: Supervisor) -> None:
    until = time.monotonic() + 20
    while found.look() != "over":
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_signal_to_the_launcher_reaches_all_and_who_does_not_stop_in_time_is_ended(
    own_daemon: Callable[..., Daemon], group: Callable[[str], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    found = supervisor(own_daemon(), stop_seconds=1.0)
    stops = group(f"trap 'exit {TrainingStopped.exit_code}' TERM; touch {tmp_path}/a; while :; do sleep 0.02; done")
    stays = group(f"trap '' TERM; touch {tmp_path}/b; sleep 300 & wait")
    while not ((tmp_path / "a").exists() and (tmp_path / "b").exists()):
        time.sleep(0.02)
    found.started([stops.pid, stays.pid])
    os.kill(os.getpid(), signal.SIGUSR1)
    look_until_over(found)
    assert stops.wait(10) == TrainingStopped.exit_code
    assert stays.wait(10) == -signal.SIGKILL
    assert not found.again()
    assert isinstance(found.outcome, TrainingStopped)


def test_a_worker_that_fails_takes_the_others_with_it(
    own_daemon: Callable[..., Daemon], group: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    older = group("exec sleep 300")
    found = supervisor(own_daemon(), stop_seconds=60.0)
    fails, waits, done = group("exit 7"), group("trap '' TERM; exec sleep 300"), group("exit 0")
    wait_until(lambda: psutil.Process(done.pid).status() == psutil.STATUS_ZOMBIE, "an end", deadline_seconds=30)
    found.started([fails.pid, waits.pid, done.pid])
    look_until_over(found)
    assert (fails.wait(10), waits.wait(10), done.wait(10)) == (7, -signal.SIGKILL, 0)
    assert older.poll() is None  # it was there before
