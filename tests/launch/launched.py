"""``ckptd run`` as a process, and what it tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from devtools.processes import kill_group, spawn

DONE_SECONDS = 160
"""Several processes that import torch one after the other, on a machine that is busy with other tests."""


class Launched:
    """One launcher with its workers, started again and again."""

    def __init__(self, events: Path, output: Path) -> None:
        """Files in which it leaves its traces: its events, and what it and its workers print."""
        self._events = events
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, socket: Path, arguments: Sequence[str | Path]) -> None:
        """With a daemon at ``socket``. Returns when it has been started."""
        argv = ["run", "--socket", socket, "--events", self._events, *arguments]
        with self._output.open("ab") as output:
            self._process = spawn(
                [sys.executable, "-c", "from ckptd.cli import main; main()", *argv],
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
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def output(self) -> str:
        return self._output.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Of the launcher."""
        return [event for event in lines_of(self._events) if event["event"] == kind]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Of JSON; none where there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
