"""ckptd itself, with a daemon of its own."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from bench.subject import Handle, Promises, Subject
from ckptd.errors import DeadlineExceeded
from ckptd_client import Checkpointer, Keep, Save
from devtools.processes import kill_group, spawn, wait_until

DAEMON_SECONDS = 30.0
TRAINER_START_SECONDS = 6.0
"""From the daemon's start until a trainer restores, at most: it imports torch and builds its model meanwhile."""


class _Saving(Handle):
    def __init__(self, checkpointer: Checkpointer, save: Save) -> None:
        self._checkpointer = checkpointer
        self._save = save

    def wait_copied(self) -> None:
        self._checkpointer.fence()

    def wait_durable(self) -> None:
        self._save.wait("committed")


class Overlapped(Subject):
    """As it comes. Complete means committed: durable, and the manifest too."""

    promises = Promises(fsync=True, digest="xxh3-128", commit="manifest, last", software=f"ckptd {version('ckptd')}")
    restores_from_memory = True
    overlap = True

    def open(self) -> None:
        self._daemon = self._start_daemon()
        self._checkpointer = self._connect()
        self._checkpointer.restore()  # nothing; as a training script does, and it opens the generation

    def _start_daemon(self) -> subprocess.Popen[bytes]:
        self._place = Path(tempfile.mkdtemp(prefix="ckptd-bench-"))  # short enough for the name of a socket
        self._socket = self._place / "ckptd.sock"
        state = self.folder / "state"  # kept, as on a node that comes back
        options: list[str | Path] = ["--socket", self._socket, "--log-file", self._place / "log", "--state-dir", state]
        daemon = spawn([sys.executable, "-m", "ckptd.daemon", *options])
        wait_until(
            lambda: self._socket.exists() or daemon.poll() is not None,
            "the daemon's socket",
            deadline_seconds=DAEMON_SECONDS,
        )
        return daemon

    def _connect(self) -> Checkpointer:
        return Checkpointer(
            f"file://{self.folder / 'run'}",
            self.state.parts(),
            overlap=self.overlap,
            keep=Keep(last=2),
            socket=self._socket,
            on_error="raise",
        )

    def save(self, step: int) -> Handle:
        return _Saving(self._checkpointer, self._checkpointer.save(step))

    def stepped(self, step: int) -> None:
        self._checkpointer.step(step)

    def restart(self, *, keep_memory: bool) -> None:
        self._checkpointer.close()
        if not keep_memory:
            self._stop_daemon()
            self._daemon = self._start_daemon()
            with contextlib.suppress(DeadlineExceeded):
                wait_until(
                    lambda: "made ahead" in (self._place / "log").read_text(),
                    "an arena",
                    deadline_seconds=TRAINER_START_SECONDS,
                )

    def restore(self, step: int) -> None:
        self._checkpointer = self._connect()
        self._checkpointer.restore(step, required=True)

    def stored(self, step: int) -> Path:
        (found,) = (self.folder / "run" / "checkpoints").glob(f"{step:012d}-*")
        return found

    def discard(self, step: int) -> None:
        pass  # the daemon does, as keep= says

    def close(self) -> None:
        self._checkpointer.close()
        self._stop_daemon()

    def _stop_daemon(self) -> None:
        kill_group(self._daemon)
        shutil.rmtree(self._place)


class Eager(Overlapped):
    """The call copies everything."""

    overlap = False
