"""DLRover's flash checkpoint for data parallelism: a copy in shared memory, and a process that writes it."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.subject import Handle, Promises, Subject

_RUN = "TORCHELASTIC_RUN_ID"
os.environ[_RUN] = f"bench{uuid.uuid4().hex[:12]}"  # its sockets and shared memory are named by it
_SOCKETS = "SOCKET_TMP_DIR"
_TRACKER = "dlrover_latest.txt"
_POLL_SECONDS = 0.002
_SAVE_SECONDS = 300.0

_library: Any = import_module("dlrover.trainer.torch.flash_checkpoint.ddp")


class _Saving(Handle):
    def __init__(self, tracker: Path, step: int) -> None:
        self._tracker = tracker
        self._step = step

    def wait_copied(self) -> None:
        pass  # the call has copied everything

    def wait_durable(self) -> None:
        """Its own wait looks every three seconds: the file that it looks at is looked at oftener here."""
        until = time.monotonic() + _SAVE_SECONDS
        while not (self._tracker.exists() and self._tracker.read_text() == str(self._step)):
            if time.monotonic() > until:
                raise TimeoutError(f"{_TRACKER} does not name the step after {_SAVE_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)


class Flash(Subject):
    """To disk at every save. Skips, without a word, a save that comes while the last one is being written."""

    promises = Promises(fsync=False, digest="CRC-32", commit="tracker file", software=f"dlrover {version('dlrover')}")
    restores_from_memory = True

    def open(self) -> None:
        self._kept = False
        self._checkpointer = _library.DdpCheckpointer(str(self.folder))

    def save(self, step: int) -> Handle:
        path = self.stored(step) / "rank_0.pt"
        self._checkpointer.save_checkpoint(step, self.state.state_dict(), str(path))
        return _Saving(self.folder / _TRACKER, step)

    def stored(self, step: int) -> Path:
        return self.folder / str(step)

    def restart(self, *, keep_memory: bool) -> None:
        self._kept = keep_memory

    def restore(self, step: int) -> None:
        engine = self._checkpointer._engine
        saved = engine.load() if self._kept else engine._load_from_storage(str(self.stored(step) / "rank_0.pt"))
        self.state.load_state_dict(saved)

    def close(self) -> None:
        engine = self._checkpointer._engine
        engine.saver_proc.terminate()
        engine.saver_proc.join()
        engine._shm_handler.unlink()
        engine.close()
        sockets: str = getattr(import_module("dlrover.python.common.multi_process"), _SOCKETS)
        shutil.rmtree(Path(sockets) / os.environ[_RUN], ignore_errors=True)
