"""What the demo works with: a folder of its own, a daemon with a bandwidth limit, trainers that it may kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.cli.daemon_call import call
from ckptd.errors import DaemonError
from ckptd.limits import MIB
from ckptd.wire.channel import SOCKET_VARIABLE
from ckptd.wire.messages import GetStatus, Status
from devtools.processes import kill_group, spawn, wait_until
from examples.demo.compare import FINAL_NAME, LOG_NAME

WAIT_SECONDS = 120.0
"""For anything that a process is to reach; far more than it needs."""
POLL_SECONDS = 0.005
TRAINER = (sys.executable, "-m", "examples.train", "--threads", "1", "--batch", "6")
Process = subprocess.Popen[bytes]


class DemoFailed(Exception):
    """Something was not as promised."""


@dataclass
class Stage:
    """One run in ``folder``: its trainers, one after the other, and the daemon beside them. Leaves no process."""

    folder: Path
    url: str
    socket: Path
    """Where the daemon listens: in a folder that nobody else uses."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    on_wait: Callable[[], None] = lambda: None
    """Called again and again while something is awaited."""
    trainer: Process | None = None
    daemon: Process | None = None

    # Processes

    def start_daemon(self, bytes_per_second: float) -> None:
        """``ckptd serve --bandwidth``, and wait until it answers."""
        limit = f"{bytes_per_second / MIB:.3f}"
        argv = [sys.executable, "-m", "ckptd.daemon", "--socket", str(self.socket)]
        argv += ["--bandwidth", limit, "--idle-exit", "0"]
        with (self.folder / "daemon.log").open("ab") as log:
            self.daemon = spawn(argv, env=self.environment, output=log)
        self.wait_for(self._answers, "the daemon to answer")

    def _answers(self) -> bool:
        with contextlib.suppress(DaemonError):
            return bool(self.status())
        return False

    def start_trainer(self, options: Sequence[str]) -> None:
        """The next life of the trainer; all of them append to one log."""
        argv = [*TRAINER, *options, "--events", str(self.folder / LOG_NAME), "--final", str(self.folder / FINAL_NAME)]
        environment = {**self.environment, SOCKET_VARIABLE: str(self.socket)}
        with (self.folder / "trainer.log").open("ab") as log:
            self.trainer = spawn(argv, env=environment, output=log)

    def kill_trainer(self) -> None:
        """SIGKILL; on return it is gone."""
        self._kill(self.trainer, "trainer")

    def kill_both(self) -> None:
        """SIGKILL to trainer and daemon at once, so that neither sees the other die and does something about it."""
        for process in (self.trainer, self.daemon):
            if process is not None:
                os.kill(process.pid, signal.SIGKILL)
        self._kill(self.trainer, "trainer")
        self._kill(self.daemon, "daemon")

    def _kill(self, process: Process | None, name: str) -> None:
        if process is None:
            raise DemoFailed(f"there is no {name} to kill")
        kill_group(process)
        if process.returncode != -signal.SIGKILL:
            raise DemoFailed(f"the {name} had ended by itself, with {process.returncode}{self._tail(name)}")

    def close(self) -> None:
        """End whatever runs. Idempotent."""
        for process in (self.trainer, self.daemon):
            if process is not None:
                kill_group(process)
        # A trainer that lost its daemon starts another one, which is nobody's child.
        with contextlib.suppress(DaemonError, ProcessLookupError):
            os.kill(self.status()["pid"], signal.SIGKILL)

    # What it sees

    def status(self) -> dict[str, Any]:
        """What ``ckptd status --json`` shows. Raises :class:`DaemonError` where no daemon answers."""
        return call(self.socket, GetStatus(), Status, seconds=10).status

    def last_step(self) -> int:
        """The last step that the trainer has logged; 0 before the first."""
        path = self.folder / LOG_NAME
        if not path.exists():
            return 0
        with path.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - 2000, 0))
            steps = [json.loads(line).get("step", 0) for line in log.read().splitlines() if line.startswith(b"{")]
        return steps[-1] if steps else 0

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Until it holds. Raises :class:`DemoFailed` when a process ends with an error meanwhile."""

        def check() -> bool:
            self.on_wait()
            if condition():
                return True
            for name, process in (("trainer", self.trainer), ("daemon", self.daemon)):
                if process is not None and process.poll() is not None and process.returncode not in (0, -9):
                    raise DemoFailed(f"the {name} ended with {process.returncode}{self._tail(name)}")
            return False

        wait_until(check, what, deadline_seconds=WAIT_SECONDS, every_seconds=POLL_SECONDS)

    def wait_for_trainer(self) -> None:
        """Until it ends by itself, well."""
        trainer = self.trainer
        if trainer is not None:
            self.wait_for(lambda: trainer.poll() == 0, "the trainer to end")

    def _tail(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return f":\n{log.read_text(errors='replace')[-3000:]}" if log.exists() else ""


@contextlib.contextmanager
def stage(folder: Path, url: str, environment: Mapping[str, str], on_wait: Callable[[], None]) -> Generator[Stage]:
    """A stage over a new folder, of which no process remains."""
    folder.mkdir(mode=0o700)
    # The path of a socket must be short, whatever the place for temporary files is called.
    with tempfile.TemporaryDirectory(prefix=f"ckptd-demo-{os.getpid()}-", dir="/tmp") as short:
        made = Stage(folder, url, Path(short) / "daemon.sock", environment, on_wait)
        try:
            yield made
        finally:
            made.close()
