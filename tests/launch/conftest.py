"""``ckptd run`` as a process, with a daemon of the test's own, and what it and its workers have told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools.processes import kill_group, spawn, wait_until
from tests.client.conftest import Daemon, own_daemon

__all__ = ["own_daemon"]

SCRIPT = Path(__file__).with_name("script.py")
DONE_SECONDS = 160
"""Several processes that import torch one after the other, on a machine that is busy with other tests."""


class Launcher:
    """One launch of the script, and the files in which it leaves its traces."""

    def __init__(self, folder: Path, daemon: Daemon) -> None:
        self.folder = folder
        self.url = f"file://{folder / 'run'}"
        self._daemon = daemon
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, scenario: str, *options: str) -> None:
        """Returns when it has been started."""
        argv = ["run", "--socket", self._daemon.socket, "--events", self.folder / "events.jsonl", *options]
        script = ["--", SCRIPT, self.url, self.folder, scenario]
        with (self.folder / "output.txt").open("ab") as output:
            self._process = spawn(
                [sys.executable, "-c", "from ckptd.cli import main; main()", *argv, *script],
                output=output,
                env={"OMP_NUM_THREADS": "1"},
            )

    def wait(self) -> int:
        """Its exit code. What it printed is shown where it does not end."""
        assert self._process is not None
        try:
            return self._process.wait(DONE_SECONDS)
        except subprocess.TimeoutExpired:
            print(self.output)
            raise

    def signal(self, number: int) -> None:
        """To the launcher itself."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """Idempotent. Its workers die with it."""
        if self._process is not None:
            kill_group(self._process)

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Of the launcher."""
        return [event for event in _lines(self.folder / "events.jsonl") if event["event"] == kind]

    def told(self, rank: int = 0) -> list[dict[str, Any]]:
        """What the workers of a rank wrote, over all starts."""
        return _lines(self.folder / f"rank{rank}.jsonl")

    def await_step(self, step: int, *, ranks: int = 1) -> None:
        """Until all ranks have done a step."""

        def there() -> bool:
            return all(any(line.get("step", 0) >= step for line in self.told(rank)) for rank in range(ranks))

        wait_until(there, f"step {step}", deadline_seconds=DONE_SECONDS, every_seconds=0.1)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


HANG = ("--on-hang", "notify,end", "--hang-floor", "4", "--hang-grace", "0.5")


@pytest.fixture
def launcher_of_the_impatient(own_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Launcher]:
    """Its daemon ends what makes no step for 4 s."""
    found = Launcher(tmp_path, own_daemon(*HANG))
    yield found
    found.end()


@pytest.fixture
def launcher(own_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Launcher]:
    found = Launcher(tmp_path, own_daemon())
    yield found
    found.end()
