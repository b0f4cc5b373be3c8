"""Several nodes on one machine: each with a daemon and a launcher of its own; and one rendezvous, which stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from devtools.processes import kill_group, spawn, wait_until
from tests.client.conftest import Daemon

DONE_SECONDS = 160
"""Several processes that import torch one after the other, on a machine that is busy with other tests."""
RENDEZVOUS = "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=8,join_timeout=120"
"""A node that is silent for 8 s is gone, and others are waited for 2 s once there are enough."""


class Rendezvous:
    """Its store, in this process."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    @property
    def options(self) -> list[str]:
        """For each launcher."""
        endpoint = f"127.0.0.1:{self._store.port}"
        return ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job", "--rdzv-conf", RENDEZVOUS]

    def close(self) -> None:
        """Once."""
        del self._store


class Node:
    """One launcher with its workers, and the daemon beside it."""

    def __init__(self, name: str, folder: Path, daemon: Daemon, rendezvous: Sequence[str]) -> None:
        """``rendezvous``: the options that lead to it."""
        self.daemon = daemon
        self._folder = folder
        self._name = name
        self._rendezvous = rendezvous
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str | Path) -> None:
        """``options``: of ours, the script and its arguments."""
        argv = ["run", "--socket", self.daemon.socket, "--events", self._folder / f"{self._name}.jsonl"]
        with self._output.open("ab") as output:
            self._process = spawn(
                [
                    sys.executable,
                    "-c",
                    "from ckptd.cli import main; main()",
                    *argv,
                    *self._rendezvous,
                    *options,
                ],
                output=output,
                env={"OMP_NUM_THREADS": "1"},
            )

    def wait(self) -> int:
        """Its launcher's exit code. What it printed is shown where it does not end."""
        assert self._process is not None
        try:
            return self._process.wait(DONE_SECONDS)
        except subprocess.TimeoutExpired:
            print(self.output)
            raise

    def signal(self, number: int) -> None:
        """To its launcher."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """All of it at once, as by a lost machine; the workers die with the launcher. Idempotent."""
        if self._process is not None:
            kill_group(self._process)
        self.daemon.kill()

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def _output(self) -> Path:
        return self._folder / f"{self._name}.txt"

    @property
    def output(self) -> str:
        return self._output.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Of the launcher."""
        path = self._folder / f"{self._name}.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event for event in events if event["event"] == kind]

    def await_event(self, kind: str) -> dict[str, Any]:
        """The first of a kind."""

        def there() -> bool:
            assert self.runs or self.events(kind), self.output[-5000:]
            return bool(self.events(kind))

        wait_until(there, f"{kind} of node {self._name}", deadline_seconds=DONE_SECONDS, every_seconds=0.1)
        return self.events(kind)[0]
