"""Several nodes on one machine: each with a daemon and a launcher of its own; and one rendezvous, which stays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from devtools.processes import wait_until
from tests.client.conftest import Daemon
from tests.launch.launched import DONE_SECONDS, Launched

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


class Node(Launched):
    """One launcher with its workers, and the daemon beside it."""

    def __init__(self, name: str, folder: Path, daemon: Daemon, rendezvous: Sequence[str]) -> None:
        """``rendezvous``: the options that lead to it."""
        super().__init__(folder / f"{name}.jsonl", folder / f"{name}.txt")
        self.daemon = daemon
        self._name = name
        self._rendezvous = rendezvous

    def start(self, *options: str | Path) -> None:
        """``options``: of ours, the script and its arguments."""
        self.launch(self.daemon.socket, [*self._rendezvous, *options])

    def end(self) -> None:
        """All of it at once, as by a lost machine. Idempotent."""
        super().end()
        self.daemon.kill()

    def await_event(self, kind: str) -> dict[str, Any]:
        """The first of a kind."""

        def there() -> bool:
            assert self.runs or self.events(kind), self.output[-5000:]
            return bool(self.events(kind))

        wait_until(there, f"{kind} of node {self._name}", deadline_seconds=DONE_SECONDS, every_seconds=0.1)
        return self.events(kind)[0]
