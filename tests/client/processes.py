"""Training processes as the tests see them: started, listened to, killed."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptd.errors import DeadlineExceeded
from devtools.processes import kill_group, spawn

EVENT_SECONDS = 60.0


class TrainingProcess:
    """One trainer. Use it as a context manager."""

    def __init__(self, socket: Path, url: str, *, env: Mapping[str, str] | None = None, **options: Any) -> None:
        settings = {"socket": str(socket), "url": url, **options}
        self._process: subprocess.Popen[bytes] = spawn(
            [sys.executable, "-m", "tests.client.training_process", json.dumps(settings)],
            env=env,
            output=subprocess.PIPE,
        )
        self.events: list[dict[str, Any]] = []
        self.output: list[str] = []
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._queue.put(json.loads(line))
            except ValueError:
                self.output.append(line.decode(errors="replace"))
        self._queue.put(None)

    def until(self, event: str, **fields: Any) -> dict[str, Any]:
        """The first event from now on of that name and with those fields."""
        while True:
            try:
                found = self._queue.get(timeout=EVENT_SECONDS)
            except queue.Empty:
                raise DeadlineExceeded(f"no {event} within {EVENT_SECONDS:g} s: {self.events[-3:]}") from None
            if found is None:
                raise AssertionError(f"the trainer ended before {event} {fields}:\n{''.join(self.output[-40:])}")
            self.events.append(found)
            if found["event"] == event and all(found.get(name) == value for name, value in fields.items()):
                return found

    def signal(self, number: int) -> None:
        """SIGSTOP, SIGCONT and the like."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        kill_group(self._process)

    def end(self) -> int:
        """Wait for it to end by itself; its exit status."""
        return self._process.wait(EVENT_SECONDS)

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGCONT)
        kill_group(self._process)
        self._reader.join(EVENT_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()
